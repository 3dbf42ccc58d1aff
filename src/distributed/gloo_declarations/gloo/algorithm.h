#pragma once
// Nothing of it is needed; see context.h.
