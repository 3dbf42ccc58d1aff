// The vectors of the kernels: Highway's, or in a source that defines SNUG_ONE_LANE those of one_lane.h.
#if defined(SNUG_ONE_LANE)
#include "src/kernels/one_lane.h"
#else
#include <hwy/highway.h>
#endif
