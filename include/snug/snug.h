#pragma once
// All headers of the target snug::snug, for programs that use snug. The headers of distributed/ and exported/ belong to
// the targets snug::distributed and snug::exported, and are included one by one. The library itself never includes this
// file. This file builds on torch/torch.h; include single headers instead where compile time matters.

#include <torch/torch.h>

#include "snug/accumulation.h"
#include "snug/adamw.h"
#include "snug/autocast.h"
#include "snug/checkpoint.h"
#include "snug/chunked_loss.h"
#include "snug/clip.h"
#include "snug/core.h"
#include "snug/extra/batch_norm.h"
#include "snug/extra/ema.h"
#include "snug/extra/gradient_noise.h"
#include "snug/extra/reversible.h"
#include "snug/grad_scaler.h"
#include "snug/loader.h"
#include "snug/memory.h"
#include "snug/muon.h"
#include "snug/offload.h"
#include "snug/plan.h"
#include "snug/precision.h"
#include "snug/precision_guard.h"
#include "snug/safetensors.h"
#include "snug/sampler.h"
#include "snug/schedule.h"
#include "snug/sgd.h"
#include "snug/sliced.h"
#include "snug/snapshot.h"
#include "snug/state.h"
#include "snug/step_in_backward.h"
#include "snug/stepper.h"
