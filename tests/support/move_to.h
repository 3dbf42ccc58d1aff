#pragma once
// Moving a model to a device.

#include "program/run/device.h"

namespace snug::testing {

using snug::move_to;

}  // namespace snug::testing
