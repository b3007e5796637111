// Schemas, then kernels, then the registration.
//
// The operators use the classic registration and are built from source against the torch of the
// environment. The stable ABI cannot return Dict(str, Tensor) and cannot declare alias analysis.
// Without CONSERVATIVE alias analysis, TorchScript deletes saves and merges repeated loads.
#include "ops.h"

#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "tensor.h"
#include "tensorizer-torch/bridge.rs.h"
#include "values.h"

namespace tensorizer {

namespace {

// CONSERVATIVE cannot be combined with (a!), hence the separate in-place forms: load.into for
// eager, compile and export; load_ for TorchScript.
#define LOAD_OPTIONS "bool verify=False, int? num_readers=None, Tensor? key=None"

constexpr const char* kSchemas[] = {
    "load(str uri, *, Device? device=None, " LOAD_OPTIONS ") -> Dict(str, Tensor)",
    "load.list(str uri, str[] names, *, Device? device=None, " LOAD_OPTIONS ") -> Tensor[]",
    // torch tries overloads in this order, and its error for one that does not fit prints the
    // argument. With this order it prints names, and never tensors, although a string fits where a
    // list of strings is expected.
    "load.into_one(str uri, str name, Tensor(a!) out, *, " LOAD_OPTIONS ") -> ()",
    "load.into(str uri, str[] names, Tensor(a!)[] out, *, " LOAD_OPTIONS ") -> ()",
    "load.checked(str uri, str[] names, str[] expected, *, Device? device=None, " LOAD_OPTIONS
    ") -> Tensor[]",
    "load_(str uri, str[] names, Tensor[] out, *, " LOAD_OPTIONS ") -> ()",
    "iterate(str uri, *, str[]? names=None, Device? device=None, int buffer_bytes=1073741824, "
    "str order=\"file\", " LOAD_OPTIONS ") -> int",
    // Returns the next tensors of an iterator by name: one, or several small ones; none at the end.
    "iterate_next(int iterator) -> Dict(str, Tensor)",
    "iterate_close(int iterator) -> ()",
    "names(str uri) -> str[]",
    "save(str uri, Dict(str, Tensor) tensors, *, Tensor? key=None) -> ()",
    "save.list(str uri, str[] names, Tensor[] tensors, *, Tensor? key=None) -> ()",
    // The form of load.into in a graph. A tracer keeps operators that have effects in order, but
    // operators that change their arguments may not have effects. Two fences, one before and one
    // after, keep loads in their place among saves. They are tied to the operator by the tensors
    // that they pass on.
    "_load_into(str uri, str[] names, Tensor(a!)[] out, Tensor after, *, " LOAD_OPTIONS ") -> ()",
    "_begin(str uri) -> Tensor",
    "_end(Tensor[] after) -> ()",
    // Returns what load.checked is to expect: dtype and shape of tensors, such as float32[40,30].
    "_describe(str uri, str[] names) -> str[]",
};

#undef LOAD_OPTIONS

// True if a tracer or another dispatch mode watches the calls of this thread. Then operators that
// are made of others call those through the dispatcher; otherwise they do the work at once.
bool watched() {
  return c10::impl::dispatch_mode_enabled() ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::PreDispatch);
}

// Refuses tensor subclasses that implement __torch_dispatch__. Without this, the subclass would
// handle the operator: many then pass on the plain tensors inside, which are not the value of the
// tensor. Modes that only observe, such as those that count operations, do the same.
void refuse_subclasses(const Names& names, at::TensorList tensors) {
  if (traced()) return;
  for (std::size_t at = 0; at < tensors.size(); ++at) {
    TORCH_CHECK(!tensors[at].defined() || !tensors[at].unsafeGetTensorImpl()->is_python_dispatch(),
                "tensor `", at < names.size() ? names[at] : "", "`: ", kSubclassesRefused);
  }
}

template <typename Signature>
auto find(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).template typed<Signature>();
}

std::vector<at::Tensor> load_checked(std::string uri, Names names, Names expected,
                                     OptionalDevice device, bool verify, Readers num_readers,
                                     Key key) {
  device = resolved(device);
  const auto given = options(verify, num_readers, key, number(device));
  auto loaded =
      checked([&] { return op_load_checked(str(uri), strings(names), strings(expected), given); });
  return place(*loaded, device);
}

Names describe(std::string uri, Names names) {
  const auto found = checked([&] { return op_describe(str(uri), strings(names)); });
  return Names(found.begin(), found.end());
}

// Loads through load.checked. Dtypes and shapes that the file has during tracing become part of the
// graph: it needs no file to know its shapes, and fails at run time if the file has others.
std::vector<at::Tensor> load_watched(const std::string& uri, Names names, OptionalDevice device,
                                     bool verify, Readers num_readers, Key key) {
  static const auto op =
      find<std::vector<at::Tensor>(std::string, Names, Names, OptionalDevice, bool, Readers, Key)>(
          "tensorizer::load", "checked");
  auto expected = describe(uri, names);
  return op.call(uri, std::move(names), std::move(expected), device, verify, num_readers, key);
}

std::vector<at::Tensor> load_list(std::string uri, Names names, OptionalDevice device, bool verify,
                                  Readers num_readers, Key key) {
  if (watched()) return load_watched(uri, std::move(names), device, verify, num_readers, key);
  device = resolved(device);
  const auto given = options(verify, num_readers, key, number(device));
  auto loaded = checked([&] { return op_load(str(uri), strings(names), false, given); });
  return place(*loaded, device);
}

Names names(std::string uri) {
  const auto found = checked([&] { return op_names(str(uri)); });
  return Names(found.begin(), found.end());
}

// Takes the loaded tensors by name, and copies those to the given device that are not there.
Dict placed_by_name(LoadedTensors& loaded, const OptionalDevice& device) {
  Names keys;
  keys.reserve(loaded.size());
  for (std::size_t at = 0; at < loaded.size(); ++at) keys.emplace_back(loaded.name(at));
  return by_name(std::move(keys), place(loaded, device));
}

Dict load(std::string uri, OptionalDevice device, bool verify, Readers num_readers, Key key) {
  if (watched()) {
    auto keys = names(uri);
    auto tensors = load_watched(uri, keys, device, verify, num_readers, key);
    return by_name(std::move(keys), std::move(tensors));
  }
  device = resolved(device);
  const auto given = options(verify, num_readers, key, number(device));
  auto loaded = checked([&] { return op_load(str(uri), {}, true, given); });
  return placed_by_name(*loaded, device);
}

std::int64_t iterate(std::string uri, std::optional<Names> names, OptionalDevice device,
                     std::int64_t buffer_bytes, std::string order, bool verify, Readers num_readers,
                     Key key) {
  // Under a tracer, this would begin a load that nothing ends, and its number would be a constant
  // of the graph.
  TORCH_CHECK(
      !traced(),
      "iterate cannot be part of a graph: call it outside, or under torch.compiler.disable");
  TORCH_CHECK_VALUE(buffer_bytes > 0, "buffer_bytes is ", buffer_bytes, ", expected at least 1");
  TORCH_CHECK_VALUE(order == "file" || order == "ready", "order is \"", order,
                    "\", expected \"file\" or \"ready\"");
  device = resolved(device);
  const auto given = options(verify, num_readers, key, number(device));
  const auto chosen = strings(names.value_or(Names()));
  // Tensors that come to the CPU first are copied there.
  const auto target = device ? device->str() : std::string();
  return checked([&] {
    return op_iterate(str(uri), chosen, !names, static_cast<std::uint64_t>(buffer_bytes),
                      order == "ready", target, given);
  });
}

Dict iterate_next(std::int64_t iterator) {
  // Copied first: another thread may end the iterator meanwhile.
  const std::string target(device_of(iterator));
  auto loaded = checked([&] { return op_iterate_next(iterator); });
  const auto device = target.empty() ? OptionalDevice() : OptionalDevice(at::Device(target));
  return placed_by_name(*loaded, device);
}

void iterate_close(std::int64_t iterator) {
  checked([&] { op_iterate_close(iterator); });
}

// Fills `out`. Bytes are read straight into tensors that are contiguous in memory of the CPU or of
// CUDA; others get them from a copy.
void load_into_now(std::string uri, Names names, at::TensorList out, at::Tensor after, bool verify,
                   Readers num_readers, Key key) {
  const c10::NoGradGuard no_grad;
  const auto given = options(verify, num_readers, key);
  TORCH_CHECK_VALUE(names.size() == out.size(), "expected as many names as tensors, found ",
                    names.size(), " names for ", out.size(), " tensors");
  std::vector<at::Tensor> filled;
  filled.reserve(out.size());
  for (std::size_t at = 0; at < out.size(); ++at) {
    const auto& tensor = out[at];
    TORCH_CHECK(tensor.defined() && tensor.layout() == at::kStrided && !tensor.is_quantized() &&
                    !tensor.is_nested() && !tensor.is_meta(),
                "tensor `", names[at],
                "`: expected a strided tensor with data to load into, found ",
                tensor.defined() ? tensor.toString() : "an undefined one");
    const auto missing = missing_memory(tensor);
    TORCH_CHECK(missing.empty(), "tensor `", names[at], "`: ", missing);
    const auto device = device_number(tensor.device());
    const bool direct = device != kOther && reaches(device) && tensor.is_contiguous() &&
                        !tensor.is_conj() && !tensor.is_neg();
    filled.push_back(direct ? tensor.detach()
                            : at::empty(tensor.sizes(), tensor.options().device(at::kCPU)));
  }
  const TensorList destinations(filled);
  std::vector<at::Tensor> copied;
  std::vector<at::Tensor> in_place;
  for (std::size_t at = 0; at < out.size(); ++at) {
    const bool same = filled[at].const_data_ptr() == out[at].const_data_ptr();
    (same ? in_place : copied).push_back(out[at]);
  }
  const TensorList changed(std::move(in_place));
  try {
    checked([&] { op_load_into(str(uri), strings(names), destinations, given); });
  } catch (...) {
    // Some tensors may have new bytes already.
    changed.changed();
    throw;
  }
  changed.changed();
  for (std::size_t at = 0, next = 0; at < out.size(); ++at) {
    if (filled[at].const_data_ptr() != out[at].const_data_ptr()) copied[next++].copy_(filled[at]);
  }
}

at::Tensor begin(std::string) { return at::empty({0}); }

void end(std::vector<at::Tensor>) {}

void load_into(std::string uri, Names names, at::TensorList out, bool verify, Readers num_readers,
               Key key) {
  refuse_subclasses(names, out);
  if (!watched()) return load_into_now(uri, names, out, {}, verify, num_readers, key);
  static const auto op =
      find<void(std::string, Names, at::TensorList, at::Tensor, bool, Readers, Key)>(
          "tensorizer::_load_into", "");
  static const auto before = find<at::Tensor(std::string)>("tensorizer::_begin", "");
  static const auto after = find<void(std::vector<at::Tensor>)>("tensorizer::_end", "");
  const auto begun = before.call(uri);
  op.call(std::move(uri), std::move(names), out, begun, verify, num_readers, key);
  if (!out.empty()) after.call(out.vec());
}

void load_into_one(std::string uri, std::string name, at::Tensor out, bool verify,
                   Readers num_readers, Key key) {
  load_into(std::move(uri), {std::move(name)}, {out}, verify, num_readers, key);
}

// Has the Python package, if it is loaded, refuse tensors without elements that stand for others:
// these differ from empty tensors by their Python class and attributes alone.
void refuse_without_data(const Names& names, const std::vector<at::Tensor>& tensors) {
  Names some;
  std::vector<at::Tensor> empty;
  for (std::size_t at = 0; at < std::min(names.size(), tensors.size()); ++at) {
    const auto& tensor = tensors[at];
    if (!tensor.defined() || tensor.is_meta() || tensor.layout() != at::kStrided) continue;
    if (tensor.is_nested() || tensor.numel() != 0) continue;
    some.push_back(names[at]);
    empty.push_back(tensor);
  }
  static const auto op =
      find<void(Names, std::vector<at::Tensor>)>("tensorizer::_refuse_without_data", "");
  const bool is_python = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
  if (is_python && !empty.empty()) op.call(std::move(some), std::move(empty));
}

void save_list(std::string uri, Names names, std::vector<at::Tensor> tensors, Key key) {
  refuse_without_data(names, tensors);
  const TensorList list(std::move(tensors));
  checked([&] { op_save(str(uri), strings(names), list, key_bytes(key)); });
}

// The kernel for PythonTLSSnapshot, the key at which torch saves the thread's dispatch state before
// a Python class or mode handles the call. Refuses tensor subclasses before one of these gets the
// call.
void save_list_for_python(c10::DispatchKeySet keys, std::string uri, Names names,
                          std::vector<at::Tensor> tensors, Key key) {
  refuse_subclasses(names, tensors);
  static const auto op =
      find<void(std::string, Names, std::vector<at::Tensor>, Key)>("tensorizer::save", "list");
  const at::impl::MaybeSetTLSOnEntryGuard noted;
  const c10::DispatchKeySet below(c10::DispatchKeySet::FULL_AFTER,
                                  c10::DispatchKey::PythonTLSSnapshot);
  op.redispatch(keys & below, std::move(uri), std::move(names), std::move(tensors), std::move(key));
}

void save(std::string uri, Dict tensors, Key key) {
  Names names;
  std::vector<at::Tensor> values;
  for (const auto& item : tensors) {
    names.push_back(item.key());
    values.push_back(item.value());
  }
  // Through the dispatcher, so that tracing and functionalization see save.list.
  static const auto op =
      find<void(std::string, Names, std::vector<at::Tensor>, Key)>("tensorizer::save", "list");
  op.call(std::move(uri), std::move(names), std::move(values), std::move(key));
}

// True inside a call of a tracer, which sends its fake tensors to the Meta kernels. Real tensors of
// the meta device get there, too.
bool only_traced() { return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Meta); }

void load_into_meta(std::string uri, Names names, at::TensorList out, at::Tensor after, bool verify,
                    Readers num_readers, Key key) {
  if (!only_traced()) load_into_now(uri, names, out, after, verify, num_readers, key);
}

void save_list_meta(std::string uri, Names names, std::vector<at::Tensor> tensors, Key key) {
  if (!only_traced()) save_list(uri, names, tensors, key);
}

// Takes tensors from the Python classes. The core keeps them under a handle's number, so that
// neither side ever holds the other's addresses.
void lend(std::int64_t handle, std::vector<at::Tensor> tensors) {
  checked([&] { lend_to_handle(handle, std::make_unique<TensorList>(std::move(tensors))); });
}

// Refuses tensors whose storage is too small. For Python, which copies some tensors itself.
void refuse_short(Names names, std::vector<at::Tensor> tensors) {
  TORCH_CHECK_VALUE(names.size() == tensors.size(), "expected as many names as tensors, found ",
                    names.size(), " names for ", tensors.size(), " tensors");
  for (std::size_t at = 0; at < tensors.size(); ++at) {
    const auto missing = missing_memory(tensors[at]);
    TORCH_CHECK_VALUE(missing.empty(), "tensor `", names[at], "`: ", missing);
  }
}

std::vector<at::Tensor> take(std::int64_t handle) {
  auto loaded = checked([&] { return take_from_handle(handle); });
  return take_tensors(*loaded);
}

// Registers a kernel that takes every kind of tensor. Conjugated and negated views are resolved one
// by one as each is used, not all at once before the call. Nested tensors reach the kernel, which
// refuses them with a message.
template <typename F>
void accept_every_tensor(torch::Library& library, const char* name, F&& kernel) {
  for (const auto key :
       {c10::DispatchKey::Conjugate, c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor}) {
    library.impl(name, torch::dispatch(key, torch::CppFunction::makeFallthrough()));
  }
  library.impl(name, torch::dispatch(c10::DispatchKey::CompositeImplicitAutogradNestedTensor,
                                     std::forward<F>(kernel)));
}

void define(torch::Library& library) {
  const auto implicit = c10::DispatchKey::CompositeImplicitAutograd;
  for (const auto* schema : kSchemas) {
    auto parsed = torch::jit::parseSchema(std::string("tensorizer::") + schema);
    parsed.setAliasAnalysis(parsed.is_mutable() ? c10::AliasAnalysisKind::FROM_SCHEMA
                                                : c10::AliasAnalysisKind::CONSERVATIVE);
    library.def(std::move(parsed));
  }
  const auto explicit_ = c10::DispatchKey::CompositeExplicitAutograd;
  const auto meta = c10::DispatchKey::Meta;
  // These operators are made of others, or take and return strings only. Tracers see only the
  // operators that they are made of; a tracer that keeps them would have to put dicts and strings
  // into its graph.
  for (const char* name : {"load", "load.list", "load.into", "load.into_one", "load_", "save",
                           "names", "_describe", "iterate", "iterate_next", "iterate_close"}) {
    for (const auto key : {c10::DispatchKey::PreDispatch, c10::DispatchKey::Python}) {
      library.impl(name, torch::dispatch(key, torch::CppFunction::makeFallthrough()));
    }
  }
  library.impl("load", torch::dispatch(implicit, TORCH_FN(load)));
  library.impl("load.list", torch::dispatch(implicit, TORCH_FN(load_list)));
  library.impl("load.checked", torch::dispatch(explicit_, TORCH_FN(load_checked)));
  library.impl("load.into", torch::dispatch(implicit, TORCH_FN(load_into)));
  library.impl("load.into_one", torch::dispatch(implicit, TORCH_FN(load_into_one)));
  library.impl("load_", torch::dispatch(implicit, TORCH_FN(load_into)));
  library.impl("_load_into", torch::dispatch(explicit_, TORCH_FN(load_into_now)));
  library.impl("_load_into", torch::dispatch(meta, TORCH_FN(load_into_meta)));
  library.impl("_begin", torch::dispatch(explicit_, TORCH_FN(begin)));
  library.impl("_end", torch::dispatch(explicit_, TORCH_FN(end)));
  library.impl("_end", torch::dispatch(meta, TORCH_FN(end)));
  library.impl("_describe", torch::dispatch(explicit_, TORCH_FN(describe)));
  library.impl("iterate", torch::dispatch(explicit_, TORCH_FN(iterate)));
  library.impl("iterate_next", torch::dispatch(explicit_, TORCH_FN(iterate_next)));
  library.impl("iterate_close", torch::dispatch(explicit_, TORCH_FN(iterate_close)));
  library.impl("names", torch::dispatch(explicit_, TORCH_FN(names)));
  library.impl("save", torch::dispatch(implicit, TORCH_FN(save)));
  library.impl("save.list", torch::dispatch(explicit_, TORCH_FN(save_list)));
  library.impl("save.list", torch::dispatch(meta, TORCH_FN(save_list_meta)));
  library.impl("save.list", torch::dispatch(c10::DispatchKey::PythonTLSSnapshot,
                                            TORCH_FN(save_list_for_python)));
  accept_every_tensor(library, "save.list", TORCH_FN(save_list));
  library.def("_lend(int handle, Tensor[] tensors) -> ()",
              torch::dispatch(explicit_, TORCH_FN(lend)));
  accept_every_tensor(library, "_lend", TORCH_FN(lend));
  library.def("_refuse_short(str[] names, Tensor[] tensors) -> ()",
              torch::dispatch(explicit_, TORCH_FN(refuse_short)));
  accept_every_tensor(library, "_refuse_short", TORCH_FN(refuse_short));
  // Its kernel is in Python.
  library.def("_refuse_without_data(str[] names, Tensor[] tensors) -> ()");
  library.def("_take(int handle) -> Tensor[]", torch::dispatch(explicit_, TORCH_FN(take)));
}

}  // namespace

#ifdef TENSORIZER_TCH
void load_into_list(rust::Str uri, rust::Slice<const rust::String> names, const TensorList& out) {
  Names list;
  for (const auto& name : names) list.emplace_back(name);
  load_into_now(std::string(uri), std::move(list), out.tensors(), {}, false, {}, {});
}
#endif

void register_operators() {
  TORCH_CHECK(!c10::Dispatcher::singleton().findSchema({"tensorizer::load", ""}),
              "the tensorizer operators are in this process already, from another library: load "
              "either the Python package or libtensorizer_torch.so, not both");
  // Lives as long as the process, so that nothing runs when libraries are unloaded.
  auto library = std::make_unique<torch::Library>(torch::Library::DEF, "tensorizer", std::nullopt,
                                                  __FILE__, __LINE__);
  define(*library);
  static_cast<void>(library.release());
}

}  // namespace tensorizer
