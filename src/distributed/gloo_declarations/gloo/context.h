#pragma once
// LibTorch carries Gloo's code but not Gloo's headers, which LibTorch's ProcessGroupGloo.hpp includes.
// ProcessGroupGloo.hpp has every Gloo object by pointer, so declarations of the named types are enough.
// gloo_backend.cpp alone sees the folder gloo_declarations. Tried on LibTorch 2.11.0 and 2.13.0.

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
  std::chrono::milliseconds getTimeout() const;
};

}  // namespace gloo
