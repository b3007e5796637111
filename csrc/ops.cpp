// Schemas, then kernels, then the registration.
//
// The classic registration, built from source against the torch of the environment, not the
// stable ABI: that one cannot return Dict(str, Tensor) and cannot declare alias analysis, and
// without CONSERVATIVE alias analysis TorchScript deletes saves and merges repeated loads.
#include "ops.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <torch/library.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "errors.h"
#include "tensor.h"
#include "tensorizer/src/ffi/torch.rs.h"

namespace tensorizer {

namespace {

using Names = std::vector<std::string>;
using OptionalDevice = std::optional<at::Device>;
using Dict = c10::Dict<std::string, at::Tensor>;

// CONSERVATIVE cannot be combined with (a!), hence the separate in-place forms: load.into for
// eager, compile and export; load_ for TorchScript.
struct Schema {
  const char* text;
  bool conservative;
};

constexpr Schema kSchemas[] = {
    {"load(str uri, *, Device? device=None) -> Dict(str, Tensor)", true},
    {"load.list(str uri, str[] names, *, Device? device=None) -> Tensor[]", true},
    {"load.into(str uri, str[] names, Tensor(a!)[] out) -> ()", false},
    {"load.into_one(str uri, str name, Tensor(a!) out) -> ()", false},
    {"load_(str uri, str[] names, Tensor[] out) -> ()", true},
    {"names(str uri) -> str[]", true},
    {"save(str uri, Dict(str, Tensor) tensors) -> ()", true},
    {"save.list(str uri, str[] names, Tensor[] tensors) -> ()", true},
};

// Rust strings are UTF-8; others are refused with the text that is not.
template <typename T>
T utf8(const std::string& text) {
  try {
    return T(text);
  } catch (const std::invalid_argument&) {
    TORCH_CHECK(false, "a name or address is not UTF-8: ", text);
  }
}

rust::Str str(const std::string& text) { return utf8<rust::Str>(text); }

rust::Vec<rust::String> strings(const Names& names) {
  rust::Vec<rust::String> out;
  out.reserve(names.size());
  for (const auto& name : names) out.push_back(utf8<rust::String>(name));
  return out;
}

// The tensors where the caller wants them. Without data to move, none are read.
std::vector<at::Tensor> place(Loaded& loaded, const OptionalDevice& device) {
  auto tensors = take_tensors(loaded);
  if (device && !device->is_cpu()) {
    const c10::NoGradGuard no_grad;
    for (auto& tensor : tensors) tensor = tensor.to(*device);
  }
  return tensors;
}

std::vector<at::Tensor> load_list(std::string uri, Names names, OptionalDevice device) {
  auto loaded = checked([&] { return op_load(str(uri), strings(names)); });
  return place(*loaded, device);
}

Dict load(std::string uri, OptionalDevice device) {
  auto loaded = checked([&] { return op_load_all(str(uri)); });
  Names names;
  names.reserve(loaded->size());
  for (std::size_t at = 0; at < loaded->size(); ++at) names.emplace_back(loaded->name(at));
  auto tensors = place(*loaded, device);
  Dict out;
  out.reserve(tensors.size());
  for (std::size_t at = 0; at < tensors.size(); ++at) {
    out.insert(std::move(names[at]), std::move(tensors[at]));
  }
  return out;
}

// Fills `out`. Bytes go straight into tensors that are contiguous in host memory; others get
// them by way of a copy.
void load_into(std::string uri, Names names, at::TensorList out) {
  const c10::NoGradGuard no_grad;
  TORCH_CHECK_VALUE(names.size() == out.size(), names.size(), " names for ", out.size(),
                    " tensors");
  std::vector<at::Tensor> host;
  host.reserve(out.size());
  for (const auto& tensor : out) {
    TORCH_CHECK(!tensor.is_meta(), "a tensor on the meta device cannot be loaded into");
    const bool direct =
        tensor.device().is_cpu() && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
    host.push_back(direct ? tensor.detach()
                          : at::empty(tensor.sizes(), tensor.options().device(at::kCPU)));
  }
  const TensorList destinations(host);
  checked([&] { op_load_into(str(uri), strings(names), destinations); });
  for (std::size_t at = 0; at < out.size(); ++at) {
    if (host[at].const_data_ptr() == out[at].const_data_ptr()) {
      out[at].unsafeGetTensorImpl()->bump_version();
    } else {
      at::Tensor(out[at]).copy_(host[at]);
    }
  }
}

void load_into_one(std::string uri, std::string name, at::Tensor out) {
  load_into(std::move(uri), {std::move(name)}, {out});
}

Names names(std::string uri) {
  Names out;
  for (const auto& name : checked([&] { return op_names(str(uri)); })) out.emplace_back(name);
  return out;
}

void save_list(std::string uri, Names names, std::vector<at::Tensor> tensors) {
  const TensorList list(std::move(tensors));
  checked([&] { op_save(str(uri), strings(names), list); });
}

void save(std::string uri, Dict tensors) {
  Names names;
  std::vector<at::Tensor> values;
  for (const auto& item : tensors) {
    names.push_back(item.key());
    values.push_back(item.value());
  }
  // Through the dispatcher, so that what traces or functionalizes save.list sees it.
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tensorizer::save", "list")
                             .typed<void(std::string, Names, std::vector<at::Tensor>)>();
  op.call(std::move(uri), std::move(names), std::move(values));
}

void no_effect_into(std::string, Names, at::TensorList) {}
void no_effect_save(std::string, Names, std::vector<at::Tensor>) {}

#ifdef TENSORIZER_PYTHON
// How the Python classes hand tensors over: the core keeps them under a number that is good for
// one use, so that neither side ever holds the other's addresses.
std::int64_t lend(std::vector<at::Tensor> tensors) {
  return checked([&] { return exchange_lend(std::make_unique<TensorList>(std::move(tensors))); });
}

std::vector<at::Tensor> take(std::int64_t ticket) {
  auto loaded = checked([&] { return exchange_take(ticket); });
  return take_tensors(*loaded);
}
#endif

// Conjugated and negated views are carried out one by one when their turn comes, not all at once
// before the call; nested tensors reach the kernel, which refuses them with a sentence.
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
  for (const auto& schema : kSchemas) {
    auto parsed = torch::jit::parseSchema(std::string("tensorizer::") + schema.text);
    parsed.setAliasAnalysis(schema.conservative ? c10::AliasAnalysisKind::CONSERVATIVE
                                                : c10::AliasAnalysisKind::FROM_SCHEMA);
    library.def(std::move(parsed));
  }
  const auto implicit = c10::DispatchKey::CompositeImplicitAutograd;
  const auto explicit_ = c10::DispatchKey::CompositeExplicitAutograd;
  const auto meta = c10::DispatchKey::Meta;
  library.impl("load", torch::dispatch(implicit, TORCH_FN(load)));
  library.impl("load.list", torch::dispatch(explicit_, TORCH_FN(load_list)));
  library.impl("load.into", torch::dispatch(explicit_, TORCH_FN(load_into)));
  library.impl("load.into", torch::dispatch(meta, TORCH_FN(no_effect_into)));
  library.impl("load.into_one", torch::dispatch(explicit_, TORCH_FN(load_into_one)));
  library.impl("load_", torch::dispatch(explicit_, TORCH_FN(load_into)));
  library.impl("names", torch::dispatch(explicit_, TORCH_FN(names)));
  library.impl("save", torch::dispatch(implicit, TORCH_FN(save)));
  library.impl("save.list", torch::dispatch(explicit_, TORCH_FN(save_list)));
  library.impl("save.list", torch::dispatch(meta, TORCH_FN(no_effect_save)));
  accept_every_tensor(library, "save.list", TORCH_FN(save_list));
#ifdef TENSORIZER_PYTHON
  library.def("_lend(Tensor[] tensors) -> int", torch::dispatch(explicit_, TORCH_FN(lend)));
  accept_every_tensor(library, "_lend", TORCH_FN(lend));
  library.def("_take(int ticket) -> Tensor[]", torch::dispatch(explicit_, TORCH_FN(take)));
#endif
}

}  // namespace

void register_operators() {
  TORCH_CHECK(!c10::Dispatcher::singleton().findSchema({"tensorizer::load", ""}),
              "the tensorizer operators are in this process already, from another library: load "
              "either the Python package or libtensorizer_torch.so, not both");
  // Lives as long as the process: nothing is left to run when libraries are being unloaded.
  auto library = std::make_unique<torch::Library>(torch::Library::DEF, "tensorizer", std::nullopt,
                                                  __FILE__, __LINE__);
  define(*library);
  static_cast<void>(library.release());
}

}  // namespace tensorizer
