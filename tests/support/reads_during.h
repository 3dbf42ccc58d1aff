#pragma once
// Reads of the host: each waits for the device.

#include <atomic>
#include <memory>
#include <string_view>

#include <ATen/record_function.h>

namespace snug::testing {

/// How often the host read a tensor's value during `call`.
template <class F>
int reads_during(const F& call) {
  static std::atomic<int> reads;
  reads = 0;
  const auto callback = at::addGlobalCallback(at::RecordFunctionCallback([](const at::RecordFunction& function) {
                                                if (std::string_view(function.name()) == "aten::_local_scalar_dense") {
                                                  ++reads;
                                                }
                                                return std::unique_ptr<at::ObserverContext>();
                                              }).scopes({at::RecordScope::FUNCTION}));
  call();
  at::removeCallback(callback);
  return reads;
}

}  // namespace snug::testing
