// Files that are damaged, of another kind or made to do harm: each is refused with the reason, and nothing crashes.

#include <functional>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "snug/core.h"
#include "src/core/file_system.h"
#include "src/exported/zip_archive.h"
#include "tests/exported/exported_files.h"
#include "tests/exported/zip_bytes.h"
#include "tests/support/temporary_folder.h"

namespace snug::exported_bad_files_test {
namespace {

using Json = nlohmann::json;
using Records = std::map<std::string, std::string>;
using snug::testing::exported_models;
using snug::testing::ExportedCase;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr const char* kModel = "models/model.json";
constexpr const char* kWeights = "data/weights/model_weights_config.json";

Records records_of(const std::filesystem::path& file) {
  const detail::ZipArchive archive(file);
  Records records;
  for (const std::string& name : archive.names()) {
    records[name] = archive.text(name, archive.size(name));
  }
  return records;
}

std::string file_of(const Records& records) {
  std::vector<testing::ZipRecord> all;
  for (const auto& [name, data] : records) {
    all.push_back({.name = "model/" + name, .data = data});
  }
  return testing::zip_of(all);
}

using Edit = std::function<void(Records&)>;

Edit of_json(const char* record, std::function<void(Json&)> edit) {
  return [=](Records& records) {
    Json json = Json::parse(records.at(record));
    edit(json);
    records[record] = json.dump();
  };
}
// Of the MLP's nodes the first is linear(x, weight, bias).
Edit of_nodes(std::function<void(Json&)> edit) {
  return of_json(kModel, [=](Json& json) { edit(json["graph_module"]["graph"]["nodes"]); });
}
Edit of_weight(std::function<void(Json&)> edit) {
  return of_json(kWeights, [=](Json& json) { edit(json["config"]["layers.0.weight"]); });
}
Edit of_meta(const char* field, const Json& value) {
  return of_weight([=](Json& json) { json["tensor_meta"][field] = value; });
}
Edit of_target(const char* target) {
  return of_nodes([=](Json& nodes) { nodes[0]["target"] = target; });
}
Edit of_argument(const Json& value) {
  return of_nodes([=](Json& nodes) { nodes[0]["inputs"][0]["arg"] = value; });
}

enum class Kind { Corrupt, Config };

struct BadFile {
  const char* name;
  Edit edit;
  Kind kind;
  const char* reason;
};

std::vector<BadFile> bad_files() {
  const std::string deep(100'000, '[');
  return {
      {"no pt2", [](Records& all) { all["archive_format"] = "pt1"; }, Kind::Corrupt,
       "no archive that torch.export.save wrote"},
      {"big-endian", [](Records& all) { all["byteorder"] = "big"; }, Kind::Corrupt, "little-endian"},
      {"no JSON", [](Records& all) { all[kModel] = "{"; }, Kind::Corrupt, "is not JSON"},
      {"other JSON", [](Records& all) { all[kModel] = "[1, 2]"; }, Kind::Corrupt, "not that of torch.export"},
      {"deep JSON", [=](Records& all) { all[kModel] = deep; }, Kind::Corrupt, "JSON"},
      {"deep and closed", [=](Records& all) { all[kModel] = deep + std::string(deep.size(), ']'); }, Kind::Corrupt,
       "JSON"},
      {"schema 9", of_json(kModel, [](Json& json) { json["schema_version"]["major"] = 9; }), Kind::Config,
       "schema is 9"},
      {"inference", of_json(kModel, [](Json& json) { json["verifiers"] = {"ATEN"}; }), Kind::Config, "for inference"},
      {"torch 2.8", [](Records& all) { all.erase(kWeights); }, Kind::Config, "of torch 2.8"},
      {"unknown kind", of_argument({{"as_new", 1}}), Kind::Config, "kind as_new"},
      {"no kind", of_argument(Json::object()), Kind::Corrupt, "no object of one field"},
      {"unknown operator", of_target("torch.ops.aten.no_such.default"), Kind::Config,
       "lacks the operator aten::no_such"},
      {"no operator", of_target("torch.ops.linear"), Kind::Corrupt, "no name of an operator"},
      {"reads files", of_target("torch.ops.aten.from_file.default"), Kind::Config,
       "may not use the operator aten::from_file"},
      {"Python function", of_target("os.system"), Kind::Config, "'os.system' is a Python function"},
      {"unknown region", of_target("torch.ops.higher_order.scan"), Kind::Config, "'scan' is not supported"},
      {"region without graph", of_target("torch.ops.higher_order.cond"), Kind::Corrupt, "do not fit together"},
      {"unknown argument",
       of_nodes([](Json& nodes) { nodes[0]["inputs"].push_back({{"name", "new"}, {"arg", {{"as_int", 1}}}}); }),
       Kind::Config, "does not take"},
      {"no argument", of_nodes([](Json& nodes) { nodes[0]["inputs"].erase(1); }), Kind::Config, "no argument 'weight'"},
      {"later value", of_argument({{"as_tensor", {{"name", "later"}}}}), Kind::Corrupt,
       "'later' is used before it is made"},
      {"two of a name", of_nodes([](Json& nodes) { nodes.push_back(nodes[0]); }), Kind::Corrupt, "is made twice"},
      {"too few inputs", of_json(kModel, [](Json& json) { json["graph_module"]["signature"]["input_specs"].erase(0); }),
       Kind::Corrupt, "its signature"},
      {"dtype 99", of_meta("dtype", 99), Kind::Corrupt, "dtype 99"},
      {"another dtype", of_meta("dtype", 6), Kind::Corrupt, "which is not Float the graph says"},
      {"another shape", of_meta("sizes", {{{"as_int", 6}}, {{"as_int", 16}}}), Kind::Corrupt, "not of the shape"},
      {"negative size", of_meta("sizes", {{{"as_int", -1}}, {{"as_int", 6}}}), Kind::Corrupt, "no whole number >= 0"},
      {"large size", of_meta("sizes", {{{"as_int", 1'000'000'000}}, {{"as_int", 6}}}), Kind::Corrupt, "reaches beyond"},
      {"size that overflows", of_meta("sizes", {{{"as_int", 1LL << 62}}, {{"as_int", 1LL << 62}}}), Kind::Corrupt,
       "give no tensor"},
      {"far stride", of_meta("strides", {{{"as_int", 1LL << 60}}, {{"as_int", 1}}}), Kind::Corrupt, "give no tensor"},
      {"far offset", of_meta("storage_offset", {{"as_int", 1}}), Kind::Corrupt, "reaches beyond"},
      {"farthest offset", of_meta("storage_offset", {{"as_int", std::numeric_limits<int64_t>::max()}}), Kind::Corrupt,
       "give no tensor"},
      {"sparse", of_meta("layout", 1), Kind::Config, "sparse"},
      {"another file", of_weight([](Json& json) { json["path_name"] = "../../../../etc/passwd"; }), Kind::Corrupt,
       "has no record"},
      {"pickle", of_weight([](Json& json) { json["use_pickle"] = true; }), Kind::Config, "no pickle is opened"},
      {"no weight", of_json(kWeights, [](Json& json) { json["config"].erase("layers.0.weight"); }), Kind::Corrupt,
       "no tensor 'layers.0.weight'"},
  };
}

class BadExportedFiles : public snug::testing::WithExportedModels {
 protected:
  // What loading says; empty if it loads.
  std::string error_of(const std::string& content, Kind kind) {
    detail::replace_file(folder_ / "bad.pt2", content);
    try {
      load_exported(folder_ / "bad.pt2");
      return "";
    } catch (const CorruptFile& error) {
      return kind == Kind::Corrupt ? error.what() : fmt::format("CorruptFile: {}", error.what());
    } catch (const ConfigError& error) {
      return kind == Kind::Config ? error.what() : fmt::format("ConfigError: {}", error.what());
    }
  }

  testing::TemporaryFolder folder_;
};

TEST_F(BadExportedFiles, AreRefusedWithTheReason) {
  const Records good = records_of(exported_models() / "mlp.pt2");
  EXPECT_EQ(error_of(file_of(good), Kind::Corrupt), "");
  for (const BadFile& bad : bad_files()) {
    Records records = good;
    bad.edit(records);
    const std::string error = error_of(file_of(records), bad.kind);
    EXPECT_THAT(error, AllOf(::testing::StartsWith("load_exported: "), HasSubstr("bad.pt2"), HasSubstr(bad.reason)))
        << bad.name;
  }
}

TEST_F(BadExportedFiles, AreNamedWithLayerAndLineOfPython) {
  Records records = records_of(exported_models() / "mlp.pt2");
  of_target("torch.ops.mine.gelu.default")(records);
  EXPECT_THAT(error_of(file_of(records), Kind::Config),
              AllOf(HasSubstr("lacks the operator mine::gelu"), HasSubstr("layer layers.0, from File"),
                    HasSubstr("TORCH_LIBRARY")));
}

TEST_F(BadExportedFiles, OfAnotherProgramNameAreRefusedWithTheNamesThereAre) {
  try {
    load_exported(exported_models() / "mlp.pt2", {.train_program = "train"});
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_THAT(error.what(), HasSubstr("no program 'train'; it has: eval, model"));
  }
}

TEST_F(BadExportedFiles, WithoutAGraphForEvalRefuseEval) {
  Records records = records_of(exported_models() / "mlp.pt2");
  records.erase("models/eval.json");
  detail::replace_file(folder_ / "train.pt2", file_of(records));
  const auto model = load_exported(folder_ / "train.pt2");
  EXPECT_THROW(model->eval(), ConfigError);
  EXPECT_TRUE(model->is_training());
}

// Each field of the graph and of the weights' table is replaced by something else. Most files are refused; the others
// run, or fail with an exception of an operator.
TEST_F(BadExportedFiles, WithAnyFieldChangedDoNotCrash) {
  const ExportedCase good("tied");
  const Records records = records_of(good.file);
  const std::vector<Json> others{nullptr, -1, 1LL << 62, "x", Json::array(), Json::object(), true, 0.5};
  int loaded = 0, refused = 0;
  size_t next = 0;
  for (const char* record : {kModel, kWeights}) {
    const Json whole = Json::parse(records.at(record));
    const Json fields = whole.flatten();
    for (const auto& [path, value] : fields.items()) {
      Json changed = whole;
      changed[Json::json_pointer(path)] = others[next++ % others.size()];
      Records edited = records;
      edited[record] = changed.dump();
      detail::replace_file(folder_ / "changed.pt2", file_of(edited));
      try {
        const auto model = load_exported(folder_ / "changed.pt2");
        ++loaded;
        model->run(good.inputs(0)).at(0).backward();
      } catch (const std::exception&) {
        ++refused;
      }
    }
  }
  EXPECT_GT(loaded, 100);
  EXPECT_GT(refused, 100);
}

}  // namespace
}  // namespace snug::exported_bad_files_test
