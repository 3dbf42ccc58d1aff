#pragma once
// Makes c10d's Gloo backend. The backend has a source file of its own, because the source needs declarations of Gloo.

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace snug::detail {

/// `interface`: a network interface, "eth0"; "": loopback if `is_local`, otherwise the interface to which this
/// machine's name leads. All ranks of `store` must call make_gloo_backend(). Throws c10d's exceptions.
c10::intrusive_ptr<c10d::Backend> make_gloo_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                    std::chrono::milliseconds timeout, const std::string& interface,
                                                    bool is_local);

}  // namespace snug::detail
