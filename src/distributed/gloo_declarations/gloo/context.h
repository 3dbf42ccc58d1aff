#pragma once
// LibTorch carries Gloo's code but not its headers, which its ProcessGroupGloo.hpp includes. Every Gloo object there is
// held by pointer, so the declarations that it names are enough. gloo_backend.cpp alone sees this folder. Tried on
// LibTorch 2.11.0 and 2.13.0.

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
  std::chrono::milliseconds getTimeout() const;
};

}  // namespace gloo
