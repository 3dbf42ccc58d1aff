#include "src/exported/weights.h"

#include <algorithm>
#include <memory>

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "src/core/parse_json.h"
#include "src/exported/file_types.h"

namespace snug::detail {
namespace {

std::vector<int64_t> whole_numbers(const ExportJson& list, const std::string& name) {
  std::vector<int64_t> result;
  for (const ExportJson& item : list) {
    const auto& [kind, value] = union_of(item);
    if (kind != "as_int" || !value.is_number_integer() || value.get<int64_t>() < 0) {
      throw CorruptFile(fmt::format("a size or stride of '{}' is no whole number >= 0", name));
    }
    result.push_back(value.get<int64_t>());
  }
  return result;
}

// The number of elements from the start of the storage to the end of the tensor.
int64_t extent(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t offset,
               const std::string& name) {
  int64_t last = 0, count = 1, end = 0;
  bool overflows = sizes.size() != strides.size();
  for (size_t i = 0; i < sizes.size() && !overflows; ++i) {
    int64_t step = 0;
    overflows = __builtin_mul_overflow(count, sizes[i], &count) ||
                __builtin_mul_overflow(std::max<int64_t>(sizes[i] - 1, 0), strides[i], &step) ||
                __builtin_add_overflow(last, step, &last);
  }
  if (overflows || __builtin_add_overflow(last, offset, &end) || __builtin_add_overflow(end, 1, &end)) {
    throw CorruptFile(fmt::format("sizes and strides of '{}' give no tensor", name));
  }
  return count == 0 ? 0 : end;
}

class WeightReader {
 public:
  WeightReader(const ZipArchive& archive, const std::string& program, torch::nn::Module& root, ExportedTensors& tensors)
      : archive_(archive), root_(root), tensors_(tensors) {
    for (const std::string folder : {"data/weights/", "data/constants/"}) {
      const std::string config =
          folder + program + (folder == "data/weights/" ? "_weights" : "_constants") + "_config.json";
      if (!archive.contains(config)) {
        throw ConfigError(fmt::format(
            "there is no {} in it, as in files of torch 2.8 and older; export it again with torch 2.11 or newer",
            config));
      }
      configs_.emplace(folder, read_json(archive, config).at("config"));
    }
  }

  void read(const TensorAtExport& wanted) {
    for (const auto& [folder, config] : configs_) {
      if (const auto payload = config.find(wanted.name); payload != config.end()) {
        return read_from(folder, *payload, wanted);
      }
    }
    throw CorruptFile(fmt::format("it has no tensor '{}'", wanted.name));
  }

  c10::Device device() const { return device_; }

 private:
  void read_from(const std::string& folder, const ExportJson& payload, const TensorAtExport& wanted) {
    if (payload.at("use_pickle").get<bool>()) {
      throw ConfigError(fmt::format(
          "'{}' is a tensor subclass or another object, which Python pickled; no pickle is opened", wanted.name));
    }
    const ExportJson& meta = payload.at("tensor_meta");
    device_ = device_of(meta.at("device"));
    const std::string record = folder + payload.at("path_name").get<std::string>();
    const auto [first, is_new] =
        first_names_.try_emplace(record + meta.dump() + (wanted.is_parameter ? "p" : "b"), wanted.key);
    if (!is_new) {  // a tied weight
      tensors_.all.emplace(wanted.key, tensors_.all.at(first->second));
      tensors_.aliases.emplace(wanted.key, first->second);
      return;
    }
    const at::Tensor tensor = view_of(storage_of(record), meta, wanted.name);
    torch::nn::Module& owner = module_at(root_, wanted.key);
    const std::string name = wanted.key.substr(wanted.key.rfind('.') + 1);
    tensors_.all.emplace(wanted.key, wanted.is_parameter
                                         ? owner.register_parameter(name, tensor, meta.at("requires_grad").get<bool>())
                                         : owner.register_buffer(name, tensor));
    if (!wanted.is_parameter && !wanted.is_persistent) {
      tensors_.transient.insert(wanted.key);
    }
  }

  at::Tensor storage_of(const std::string& record) {
    at::Tensor& bytes = storages_[record];
    if (!bytes.defined()) {
      bytes = at::empty({archive_.size(record)}, at::kByte);
      archive_.read(record, {static_cast<char*>(bytes.mutable_data_ptr()), bytes.nbytes()});
    }
    return bytes;
  }

  static at::Tensor view_of(const at::Tensor& bytes, const ExportJson& meta, const std::string& name) {
    if (meta.at("layout") != 7) {
      throw ConfigError(fmt::format("'{}' is a sparse tensor, which is not supported", name));
    }
    const auto sizes = whole_numbers(meta.at("sizes"), name), strides = whole_numbers(meta.at("strides"), name);
    const int64_t offset = whole_numbers(ExportJson::array({meta.at("storage_offset")}), name).front();
    at::Tensor tensor = at::empty({0}, scalar_type_of(meta.at("dtype")));
    if (extent(sizes, strides, offset, name) > bytes.numel() / static_cast<int64_t>(tensor.element_size())) {
      throw CorruptFile(fmt::format("'{}' reaches beyond the {} bytes that the file has for it", name, bytes.numel()));
    }
    return tensor.set_(bytes.storage(), offset, sizes, strides);
  }

  const ZipArchive& archive_;
  torch::nn::Module& root_;
  ExportedTensors& tensors_;
  std::map<std::string, ExportJson> configs_;  // by folder
  std::map<std::string, at::Tensor> storages_;
  std::map<std::string, std::string> first_names_;  // the first name of each view, for views with several names
  c10::Device device_ = c10::kCPU;
};

void check_meta(const at::Tensor& tensor, const TensorAtExport& wanted) {
  const auto dtype = scalar_type_of(wanted.meta.at("dtype"));
  const bool has_sizes = tensor.sizes().vec() == whole_numbers(wanted.meta.at("sizes"), wanted.name);
  if (tensor.scalar_type() != dtype || !has_sizes) {
    throw CorruptFile(fmt::format("'{}' is a tensor of {} {}, which is not {} the graph says", wanted.name,
                                  c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), "x"),
                                  has_sizes ? c10::toString(dtype) : "of the shape that"));
  }
}

}  // namespace

c10::Device read_weights(const ZipArchive& archive, const std::string& program,
                         const std::vector<TensorAtExport>& wanted, torch::nn::Module& root, ExportedTensors& tensors) {
  WeightReader reader(archive, program, root, tensors);
  for (const TensorAtExport& one : wanted) {
    if (!tensors.all.contains(one.key)) {
      reader.read(one);
    }
    check_meta(tensors.all.at(one.key), one);
  }
  return reader.device();
}

torch::nn::Module& module_at(torch::nn::Module& root, const std::string& path) {
  constexpr auto kDeepest = 100;  // destructors recurse
  if (std::count(path.begin(), path.end(), '.') > kDeepest) {
    throw CorruptFile(fmt::format("a name has more than {} parts", kDeepest));
  }
  torch::nn::Module* owner = &root;
  size_t begin = 0;
  for (size_t dot = path.find('.'); dot != std::string::npos; begin = dot + 1, dot = path.find('.', begin)) {
    const std::string child = path.substr(begin, dot - begin);
    const auto children = owner->named_children();
    const auto* found = children.find(child);
    owner = found != nullptr ? found->get()
                             : owner->register_module(child, std::make_shared<torch::nn::Module>(child)).get();
  }
  return *owner;
}

void cast_floats(const std::map<std::string, at::Tensor>& tensors, std::optional<at::Device> device,
                 at::ScalarType dtype, bool non_blocking) {
  for (const auto& [name, tensor] : tensors) {
    const auto wanted = tensor.is_floating_point() ? dtype : tensor.scalar_type();
    tensor.set_data(tensor.to(device.value_or(tensor.device()), wanted, non_blocking));
  }
}

ExportJson read_json(const ZipArchive& archive, const std::string& record) {
  constexpr int64_t kLongest = 1 << 30;
  try {
    return parse_json<ExportJson>(archive.text(record, kLongest));
  } catch (const ExportJson::exception& error) {
    throw CorruptFile(fmt::format("'{}' is not JSON ({})", record, error.what()));
  }
}

}  // namespace snug::detail
