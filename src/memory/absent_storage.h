#pragma once
// Storages of weights whose values are elsewhere for a while: on the host, or on another rank (WeightHome).
//
// Problem: views, graphs and optimizers know a weight by its storage, so the storage must stay while the memory goes.
// Without an address, LibTorch and snug take a storage for an empty one.
// Choice: a storage without memory has an address that nobody reads, and LibTorch's mark of storages that must not be
// accessed. An access throws, with the cure. The storage may keep its values, in memory of the host.

#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>

namespace snug::detail {

/// Gives `storage` memory. The storage can be accessed from here on.
void give_memory(const c10::Storage& storage, c10::DataPtr memory);
/// Releases the memory of `storage`. From here on an access throws c10::Error with the text `why`. `address` is not
/// null, and is never read.
void take_memory(const c10::Storage& storage, void* address, std::string why);
/// The same, and `storage` keeps `values`, which are bytes in the host's memory, until give_memory().
void take_memory(const c10::Storage& storage, const at::Tensor& values, std::string why);
/// The values that `storage` keeps; undefined: none.
at::Tensor kept_values(const c10::Storage& storage);

/// Memory of another owner, as a part of a window is.
c10::DataPtr borrowed_memory(void* address, c10::Device device);
/// Whether `memory` is borrowed_memory(), or was taken by take_memory().
bool is_borrowed_or_absent(const c10::DataPtr& memory);

}  // namespace snug::detail
