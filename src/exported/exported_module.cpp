#include "snug/exported/exported_module.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "snug/core.h"
#include "src/exported/program.h"

namespace snug {
namespace {

std::string message(const std::filesystem::path& file, const std::string& what) {
  return fmt::format("load_exported: {}: {}", file.string(), what);
}

constexpr const char* kDamagedModel = "is the file incomplete, damaged or of another format?";

// Exceptions of parsers become errors of the file, with the file's name.
template <class F>
void naming_the_file(const std::filesystem::path& file, F read) {
  try {
    read();
  } catch (const ConfigError& error) {
    throw ConfigError(message(file, error.what()));
  } catch (const CorruptFile& error) {
    throw CorruptFile(message(file, fmt::format("{}; {}", error.what(), kDamagedModel)));
  } catch (const detail::ExportJson::exception& error) {
    throw CorruptFile(
        message(file, fmt::format("its JSON is not that of torch.export ({}); {}", error.what(), kDamagedModel)));
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    throw CorruptFile(message(file, fmt::format("{}; {}", error.what_without_backtrace(), kDamagedModel)));
  }
}

void check_kind(const detail::ZipArchive& archive) {
  constexpr int64_t kLongest = 64;
  if (!archive.contains("archive_format") || archive.text("archive_format", kLongest) != "pt2" ||
      archive.text("archive_version", kLongest) != "0" ||
      (archive.contains("byteorder") && archive.text("byteorder", kLongest) != "little")) {
    throw CorruptFile("it is no archive that torch.export.save wrote on a little-endian machine");
  }
}

std::string program_names(const detail::ZipArchive& archive) {
  std::vector<std::string> names;
  for (const std::string& record : archive.names()) {
    if (record.starts_with("models/") && record.ends_with(".json")) {
      names.push_back(record.substr(7, record.size() - 12));
    }
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

}  // namespace

ExportedModule::ExportedModule(const std::filesystem::path& file, const ExportedOptions& options)
    : torch::nn::Module("ExportedModule"),
      tensors_(std::make_unique<detail::ExportedTensors>()),
      file_(file.string()),
      autocast_cache_(options.autocast_cache) {
  naming_the_file(file, [&] {
    const detail::ZipArchive archive(file);
    check_kind(archive);
    if (!archive.contains("models/" + options.train_program + ".json")) {
      throw ConfigError(
          fmt::format("it has no program '{}'; it has: {}", options.train_program, program_names(archive)));
    }
    train_ = detail::read_program(archive, options.train_program, *this, *tensors_);
    if (archive.contains("models/" + options.eval_program + ".json")) {
      eval_ = detail::read_program(archive, options.eval_program, *this, *tensors_);
    }
    for (const detail::InputAtExport& input : train_->given) {
      input_names_.push_back(input.name);
    }
  });
}

ExportedModule::~ExportedModule() = default;

const detail::ExportedProgram& ExportedModule::program() const { return is_training() ? *train_ : *eval_; }

std::vector<at::Tensor> ExportedModule::run(const std::vector<at::Tensor>& inputs) {
  const auto outputs = program().run({inputs.begin(), inputs.end()}, autocast_cache_);
  std::vector<at::Tensor> result;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!outputs[i].isTensor()) {
      throw Error(fmt::format("ExportedModule: output '{}' is no tensor", output_names()[i]));
    }
    result.push_back(outputs[i].toTensor());
  }
  return result;
}

at::Tensor ExportedModule::forward(const std::vector<at::Tensor>& inputs) {
  const auto outputs = program().run({inputs.begin(), inputs.end()}, autocast_cache_);
  if (outputs.empty() || !outputs[0].isTensor()) {
    throw Error("ExportedModule: the program's first output is no tensor");
  }
  return outputs[0].toTensor();
}

at::Tensor ExportedModule::loss(const std::vector<at::Tensor>& inputs) {
  at::Tensor loss = forward(inputs);
  if (loss.dim() != 0 || !loss.is_floating_point()) {
    throw ConfigError(fmt::format(
        "ExportedModule.loss: {}: the first output '{}' is {} with {} dimensions and no loss; save a model that returns "
        "its loss as a scalar, or give snug_export.save a loss=",
        file_, output_names().front(), c10::toString(loss.scalar_type()), loss.dim()));
  }
  return loss;
}

at::Tensor ExportedModule::forward_named(const std::map<std::string, at::Tensor>& inputs) {
  std::vector<at::Tensor> in_order;
  for (const std::string& name : input_names_) {
    if (const auto found = inputs.find(name); found != inputs.end()) {
      in_order.push_back(found->second);
    }
  }
  if (in_order.size() != input_names_.size() || inputs.size() != input_names_.size()) {
    std::vector<std::string> given;
    std::transform(inputs.begin(), inputs.end(), std::back_inserter(given),
                   [](const auto& input) { return input.first; });
    throw ConfigError(fmt::format("ExportedModule.forward_named: inputs {} were given; the program's are {}",
                                  fmt::join(given, ", "), fmt::join(input_names_, ", ")));
  }
  return forward(in_order);
}

std::vector<ExportedModule::Input> ExportedModule::inputs() const {
  std::vector<ExportedModule::Input> result;
  for (const detail::InputAtExport& input : train_->given) {
    ExportedModule::Input described{.name = input.name, .dtype = input.dtype, .sizes = {}};
    for (const detail::SizeAtExport& size : input.sizes) {
      const auto range = train_->ranges.find(size.symbol);
      const detail::SizeRange open = range == train_->ranges.end() ? detail::SizeRange{} : range->second;
      described.sizes.push_back(size.fixed >= 0 ? ExportedModule::Input::Size{size.fixed, size.fixed}
                                                : ExportedModule::Input::Size{open.least, open.most});
    }
    result.push_back(std::move(described));
  }
  return result;
}

const std::vector<std::string>& ExportedModule::output_names() const { return program().output_names; }

void ExportedModule::train(bool on) {
  if (!on && eval_ == nullptr) {
    throw ConfigError(
        "ExportedModule.eval: the file has no graph for eval(), as dropout and normalisations are fixed at "
        "export; save both with "
        "python/snug_export.py, or name the other one in ExportedOptions::eval_program");
  }
  torch::nn::Module::train(on);
}

void ExportedModule::to(at::ScalarType dtype, bool non_blocking) {
  detail::cast_floats(tensors_->all, std::nullopt, dtype, non_blocking);
}

void ExportedModule::to(at::Device device, at::ScalarType dtype, bool non_blocking) {
  detail::cast_floats(tensors_->all, device, dtype, non_blocking);
}

std::map<std::string, at::Tensor> ExportedModule::state_dict() const {
  std::map<std::string, at::Tensor> result;
  for (const auto& [name, tensor] : tensors_->all) {
    if (!tensors_->aliases.contains(name) && !tensors_->transient.contains(name)) {
      result[name] = tensor.detach();
    }
  }
  return result;
}

const std::map<std::string, std::string>& ExportedModule::aliases() const { return tensors_->aliases; }

int64_t ExportedModule::operators() const { return detail::count_operators(*train_->graph); }

}  // namespace snug
