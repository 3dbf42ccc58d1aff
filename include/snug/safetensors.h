#pragma once
// Named tensors in a file format that Python's safetensors, and many other programs, read. The format has no pickle,
// and nothing in a file is ever executed. For weights to publish; for resuming a run see snapshot.h.
//
//   snug::save_safetensors("model.safetensors", {{"weight", weight}}, {{"format", "pt"}});
//   std::map<std::string, at::Tensor> tensors = snug::load_safetensors("model.safetensors");

#include <filesystem>
#include <map>
#include <string>

#include <ATen/core/Tensor.h>

namespace snug {

/// Writes all tensors and `metadata` in the safetensors format. The same content gives the same bytes. Dense tensors
/// that are contiguous on the CPU are written from their own memory. Other tensors are copied to the CPU first, and the
/// copies live until the file is written.
/// The write is atomic: the content goes to a file beside `path`, and when the content is on the disk, the file is
/// renamed to `path`. Several callers may save under one name at once; the content of the last caller stays. A kill
/// during the write leaves the file beside `path`, of up to full size. The name of such a file is the name of `path`,
/// shortened if long, with ".tmp-" and 16 hexadecimal digits. Remove such files while nobody saves to `path`.
/// Throws ConfigError:
/// - if a tensor is undefined, not dense or of a dtype that the format lacks (quantized, complex but complex64); the
///   message names the tensor;
/// - for the reserved name "__metadata__";
/// - for text that is not UTF-8.
///
/// Throws Error if the file system fails.
void save_safetensors(const std::filesystem::path& path, const std::map<std::string, at::Tensor>& tensors,
                      const std::map<std::string, std::string>& metadata = {});

/// All tensors of the file, on the CPU, each in memory of its own: the file may be replaced or removed afterwards.
/// Every field is checked before memory is allocated. Throws CorruptFile with the file, the field and the likely cause;
/// Error if the file cannot be opened or read.
/// A path that ends in .json is the index of a model in several files, as Hugging Face writes the index
/// (model.safetensors.index.json): all tensors of all files are loaded. The files lie beside the index, or are links
/// beside the index. Each file holds exactly the tensors that the index gives to the file; otherwise load_safetensors
/// throws CorruptFile.
std::map<std::string, at::Tensor> load_safetensors(const std::filesystem::path& path);

/// The file's `metadata`, as given to save_safetensors; no tensor is read. For an index: the metadata of the index,
/// with values that are not text as JSON; no other file is read. Throws as load_safetensors does.
std::map<std::string, std::string> read_safetensors_metadata(const std::filesystem::path& path);

}  // namespace snug
