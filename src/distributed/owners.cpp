#include "src/distributed/owners.h"

#include <vector>

#include "src/distributed/shard_layout.h"

namespace snug::detail {

Owners::Owners(const DataParallel::NamedTensors& parameters, std::shared_ptr<ProcessGroup> group)
    : group_(std::move(group)) {
  std::unordered_map<const c10::StorageImpl*, size_t> numbers;  // of storages, from 0
  std::vector<bool> is_trained;                                 // whether a parameter on the storage is trained
  std::vector<int64_t> bytes;
  for (const auto& [name, parameter] : parameters) {
    const auto [place, is_new] = numbers.emplace(parameter.storage().unsafeGetStorageImpl(), numbers.size());
    if (is_new) {
      is_trained.push_back(false);
      bytes.push_back(static_cast<int64_t>(parameter.storage().nbytes()));
    }
    is_trained[place->second] = is_trained[place->second] || parameter.requires_grad();
  }
  std::vector<int> owner_of(bytes.size(), 0);
  for (const bool trained : {true, false}) {
    std::vector<ShardItem> items;
    for (size_t i = 0; i < bytes.size(); ++i) {
      items.push_back({is_trained[i] == trained ? bytes[i] : 0, 1});
    }
    for (const ShardPiece& piece : shard_layout(items, group_->size(), /*cut=*/0)) {
      owner_of[piece.parameter] = piece.rank;
    }
  }
  for (const auto& [name, parameter] : parameters) {
    owners_.emplace(parameter.unsafeGetTensorImpl(), owner_of[numbers.at(parameter.storage().unsafeGetStorageImpl())]);
  }
}

}  // namespace snug::detail
