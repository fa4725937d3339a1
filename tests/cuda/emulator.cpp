// From a plan to launches on the emulated machine.
#include "tests/cuda/emulator.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string_view>
#include <vector>

#include "cuda/buffers.hpp"
#include "cuda/kernel_text.hpp"
#include "plan/cuda/config_text.hpp"
#include "plan/cuda/input_copies.hpp"
#include "plan/cuda/tma_tensor.hpp"

namespace regard::emulated {
namespace {

namespace files = std::filesystem;

// FNV-1a.
std::uint64_t hash(const std::string& text, std::uint64_t h = 0xcbf29ce484222325u) {
  for (const char c : text) h = (h ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return h;
}

// Folders that a kernel's texts are included from, first to last.
std::vector<files::path> include_folders() {
  return {source_folder() / "tests/cuda/machine", source_folder() / "src",
          source_folder() / "include"};
}

// Adds every text that a text includes, and that those include, by their paths.
void add_includes(const std::string& text, std::map<files::path, std::string>& found) {
  constexpr std::string_view kInclude = "#include \"";
  for (std::size_t at = text.find(kInclude); at != text.npos; at = text.find(kInclude, at + 1)) {
    const std::size_t first = at + kInclude.size();
    const std::string name = text.substr(first, text.find('"', first) - first);
    for (const files::path& folder : include_folders()) {
      if (!files::exists(folder / name)) continue;
      const auto [added, is_new] = found.try_emplace(folder / name, content(folder / name));
      if (is_new) add_includes(added->second, found);
      break;
    }
  }
}

// Of a unit and of every text that it includes.
std::uint64_t hash_of_texts(const std::string& unit) {
  std::map<files::path, std::string> texts;
  add_includes(unit, texts);
  std::uint64_t h = hash(unit);
  for (const auto& [path, text] : texts) h = hash(text, h);
  return h;
}

// The folder of compiled kernels; only this user may write to it.
files::path cache_folder() {
  const files::path folder =
      setting("REGARD_EMULATOR_CACHE",
              files::temp_directory_path() / ("regard-emulator-" + std::to_string(getuid())));
  files::create_directories(folder);
  struct stat state {};
  if (stat(folder.c_str(), &state) != 0 || state.st_uid != getuid()) {
    throw std::runtime_error(folder.string() + " belongs to somebody else");
  }
  chmod(folder.c_str(), 0700);
  return folder;
}

#if defined(__SANITIZE_ADDRESS__)
constexpr std::int64_t kBand = 0;  // the sanitizer sees each access that is outside
#else
constexpr std::int64_t kBand = 256;
#endif
constexpr char kPattern = char(0xa5);

// A part of the workspace: of the given one, or memory of its own between two bands of a pattern,
// which show where a kernel wrote outside its part.
class Part {
 public:
  Part(void* given, std::int64_t begin, std::int64_t end, bool clear)
      : begin_(begin), size_(end - begin) {
    if (size_ <= 0) return;
    if (given) {
      memory_ = static_cast<char*>(given) + begin;
    } else {
      if (posix_memalign(&owned_, 256, std::size_t(size_ + 2 * kBand))) throw std::bad_alloc();
      std::memset(owned_, kPattern, std::size_t(size_ + 2 * kBand));
      memory_ = static_cast<char*>(owned_) + kBand;
    }
    if (clear || owned_) std::memset(memory_, clear ? 0 : 0xff, std::size_t(size_));
  }
  ~Part() { std::free(owned_); }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;

  // Throws a Fault where a band has changed.
  void check() const {
    for (std::int64_t n = 0; owned_ && n < kBand; ++n) {
      check(-1 - n);
      check(size_ + n);
    }
  }

  template <class T>
  T* as() const {
    return static_cast<T*>(memory_);
  }

 private:
  void check(std::int64_t n) const {
    if (static_cast<const char*>(memory_)[n] == kPattern) return;
    throw Fault("byte " + std::to_string(n) + " of a part of " + std::to_string(size_) +
                " bytes was written, which begins at byte " + std::to_string(begin_) +
                " of the workspace");
  }

  std::int64_t begin_ = 0, size_ = 0;
  void* owned_ = nullptr;
  void* memory_ = nullptr;
};

}  // namespace

namespace {

// Where the unit's library is; built if it is not there.
files::path built(const std::string& unit) {
  const std::string command =
      compiler_command({source_folder() / "src", source_folder() / "include"});
  char name[40];
  std::snprintf(name, sizeof name, "%016llx.so",
                static_cast<unsigned long long>(hash(command, hash_of_texts(unit))));
  const files::path path = cache_folder() / name;
  if (!files::exists(path)) build_kernel(unit, command, path);
  return path;
}

std::string unit_of(const CudaLaunch& launch) {
  return cuda_backend::kernel_unit(launch.config).text;
}

// Units that are compiled as one, where each kernel has a name of its own. They agree in the macros
// that they begin with.
using Group = std::set<std::string>;

std::string symbol_of(std::size_t number) {
  return cuda_backend::kKernelSymbol + ("_" + std::to_string(number));
}

std::string text_of(const Group& group) {
  const std::string_view symbol = cuda_backend::kKernelSymbol;
  std::string text;
  std::size_t number = 0;
  for (std::string unit : group) {
    unit.replace(unit.find(symbol), symbol.size(), symbol_of(number++));
    text += unit;
  }
  return text;
}

// Whether a pass has several such kernels, which are small next to the texts that they include.
bool is_in_group(const KernelConfig& c) { return c.family == Family::simt && c.level == 50; }

// REGARD_EMULATOR_FIXUPS=flagged leaves out kernels of flagged rows where the call flagged none.
bool always_fixes_up() { return setting("REGARD_EMULATOR_FIXUPS", "always") != "flagged"; }

std::mutex kernels_mutex;
std::map<std::string, KernelEntry>& kernels() {  // by unit
  static std::map<std::string, KernelEntry> known;
  return known;
}

// Builds the kernels of a plan side by side; kernels_mutex is held.
void build_each(const CudaPlan& plan, Machine& machine) {
  Group simt;
  std::vector<Group> groups;
  for (const CudaLaunch& launch : plan.launches) {
    const std::string unit = unit_of(launch);
    if (kernels().contains(unit) || (launch.config.only_flagged && !always_fixes_up())) continue;
    if (is_in_group(launch.config)) {
      simt.insert(unit);
    } else {
      groups.push_back({unit});
    }
  }
  if (!simt.empty()) groups.push_back(simt);
  std::vector<std::future<files::path>> builds;
  for (const Group& group : groups) {
    builds.push_back(std::async(std::launch::async, [&] { return built(text_of(group)); }));
  }
  for (std::size_t n = 0; n < groups.size(); ++n) {
    const files::path library = builds[n].get();
    std::size_t number = 0;
    for (const std::string& unit : groups[n]) {
      kernels()[unit] = load_kernel(library, machine, symbol_of(number++));
    }
  }
}

BoxMap map_of(const TmaTensor& x) {
  BoxMap map{.data = x.data,
             .sizes = {},
             .strides = {},
             .box_columns = x.tile_columns,
             .box_rows = x.tile_rows};
  std::copy_n(x.sizes, 4, map.sizes);
  std::copy_n(x.strides, 4, map.strides);
  return map;
}

LaunchMaps maps_of(const CudaLaunch& launch, const KernelParams& params) {
  LaunchMaps maps{};
  if (launch.config.family != Family::wgmma) return maps;
  const auto set = [](TensorMap& to, const TmaTensor& x) {
    const BoxMap map = map_of(x);
    static_assert(sizeof map <= sizeof to);
    std::memcpy(&to, &map, sizeof map);
  };
  const TmaTensors x = tma_tensors(params.problem, launch.config, params.buffers.hi_lo);
  if (launch.config.kernel == Kernel::backward) {
    BackwardMaps& to = maps.backward;
    set(to.q, x.q);
    set(to.k, x.k);
    set(to.v, x.v);
    set(to.dout, x.dout);
    set(to.dk, x.dk);
    set(to.dv, x.dv);
  } else {
    ForwardMaps& to = maps.forward;
    set(to.q, x.q);
    set(to.k, x.k);
    set(to.v, x.v);
    set(to.out, x.out);
    set(to.bias, x.bias);
  }
  return maps;
}

}  // namespace

KernelEntry compiled(const std::string& unit, Machine& machine) {
  const std::lock_guard lock(kernels_mutex);
  KernelEntry& entry = kernels()[unit];
  if (!entry.function) entry = load_kernel(built(unit), machine);
  return entry;
}

namespace {

BlockMachine& block_machine() {
  static BlockMachine machine;
  return machine;
}

}  // namespace

void run_launch(const CudaLaunch& launch, KernelParams params, Schedule schedule) {
  static std::mutex mutex;
  struct Bound {
    KernelEntry entry;
    KernelParams params;
    LaunchMaps maps;
  };
  const std::lock_guard lock(mutex);
  params.grid = launch.grid;
  params.by = launch.by;
  const Bound bound{compiled(unit_of(launch), block_machine()), params, maps_of(launch, params)};
  try {
    block_machine().run({.kernel =
                             [](const void* context) {
                               const Bound& kernel = *static_cast<const Bound*>(context);
                               kernel.entry(kernel.params, kernel.maps);
                             },
                         .params = &bound,
                         .blocks = launch.blocks(),
                         .threads = launch.threads,
                         .shared_bytes = launch.shared_bytes,
                         .cluster = bound.entry.cluster,
                         .order = schedule.order,
                         .blocks_in_order = launch.config.ordered_dq ||
                                            launch.config.merges_splits || launch.config.stream_k,
                         .seed = schedule.seed});
  } catch (const Fault& fault) {
    throw Fault(std::string(fault.what()) + "\n  in " + to_text(launch.config));
  }
}

namespace {

// Whether the call flagged a row or a key.
bool has_flags(const Part& any_flag, std::uint64_t nonce) {
  const uint64* const flagged = any_flag.as<uint64>();
  return flagged[0] == nonce || flagged[1] == nonce;
}

}  // namespace

void emulate(const Problem& problem, const CudaPlan& plan, Schedule schedule, void* workspace) {
  const CudaWorkspace& w = plan.workspace;
  std::vector<std::unique_ptr<Part>> parts;
  for (int n = 0; n < kWorkspaceParts; ++n) {
    const auto part = WorkspacePart(n);
    parts.push_back(
        std::make_unique<Part>(workspace, w.begin(part), w.end(part), w.begin(part) < w.clear));
  }
  const auto at = [&](WorkspacePart part) -> const Part& { return *parts[int(part)]; };
  KernelParams params{.problem = problem,
                      .buffers = {},
                      .grid = {},
                      .by = {},
                      .splits = plan.splits,
                      .nonce = schedule.seed * 0x9E3779B97F4A7C15u | 1};
  params.buffers = buffers_at([&](WorkspacePart part) { return at(part).as<void>(); });
  params.buffers.dbias_strides = plan.dbias_strides;
  const Problem copied = with_copies(problem, plan.copies, at(WorkspacePart::copies).as<uint8>());
  for (int n = 0; n < kInputs; ++n) {
    if (plan.copies.has(Input(n))) params.buffers.copies[n] = view_of(copied, Input(n)).data;
  }
  if (w.bytes(WorkspacePart::dbias_sums) == 0) {
    params.buffers.dbias_sums = static_cast<float*>(problem.dbias.data);
  }
  {
    const std::lock_guard lock(kernels_mutex);
    build_each(plan, block_machine());
  }
  for (const CudaLaunch& launch : plan.launches) {
    const bool fixes_up = launch.config.only_flagged;
    if (fixes_up && !always_fixes_up() && !has_flags(at(WorkspacePart::any_flag), params.nonce))
      continue;
    params.problem = reads_copies(launch.config, problem) ? copied : problem;
    run_launch(launch, params, schedule);
  }
  for (const auto& each : parts) each->check();
}

}  // namespace regard::emulated
