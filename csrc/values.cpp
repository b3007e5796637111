#include "values.h"

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "errors.h"
#include "tensorizer-torch/bridge.rs.h"

namespace tensorizer {

namespace {

template <typename T>
T utf8(const std::string& text) {
  try {
    return T(text);
  } catch (const std::invalid_argument&) {
    TORCH_CHECK(false, "expected a name or address in UTF-8, found ", text);
  }
}

}  // namespace

rust::Str str(const std::string& text) { return utf8<rust::Str>(text); }

rust::Vec<rust::String> strings(const Names& names) {
  rust::Vec<rust::String> out;
  out.reserve(names.size());
  for (const auto& name : names) out.push_back(utf8<rust::String>(name));
  return out;
}

rust::Vec<std::uint8_t> key_bytes(const Key& key) {
  rust::Vec<std::uint8_t> out;
  if (!key || !key->defined()) return out;
  TORCH_CHECK_VALUE(key->scalar_type() == at::kByte && key->numel() == 32,
                    "a key is a uint8 tensor of 32 elements, found ", key->numel(), " of ",
                    key->scalar_type());
  TORCH_CHECK_VALUE(!key->is_meta(),
                    "the key is on the meta device, and has no bytes: expected one with data");
  const auto host = key->detach().cpu().contiguous();
  const auto* bytes = host.const_data_ptr<std::uint8_t>();
  out.reserve(32);
  for (std::int64_t at = 0; at < host.numel(); ++at) out.push_back(bytes[at]);
  return out;
}

OpOptions options(bool verify, Readers num_readers, const Key& key, std::int16_t device) {
  TORCH_CHECK_VALUE(!num_readers || *num_readers > 0, "num_readers is ", num_readers.value_or(0),
                    ", expected at least 1");
  return {verify, static_cast<std::uint64_t>(num_readers.value_or(0)), key_bytes(key), device};
}

OptionalDevice resolved(OptionalDevice device) {
  if (!device || !device->is_cuda() || device->has_index()) return device;
  return c10::impl::VirtualGuardImpl(at::kCUDA).getDevice();
}

std::int16_t number(const OptionalDevice& device) {
  return device ? std::max(device_number(*device), kCpu) : kCpu;
}

std::vector<at::Tensor> place(LoadedTensors& loaded, const OptionalDevice& device) {
  auto tensors = take_tensors(loaded);
  if (device) {
    const c10::NoGradGuard no_grad;
    for (auto& tensor : tensors) {
      if (tensor.device() != *device) tensor = tensor.to(*device);
    }
  }
  return tensors;
}

Dict by_name(Names keys, std::vector<at::Tensor> tensors) {
  Dict out;
  out.reserve(tensors.size());
  for (std::size_t at = 0; at < tensors.size(); ++at) {
    out.insert(std::move(keys[at]), std::move(tensors[at]));
  }
  return out;
}

bool traced() {
  using Modes = c10::impl::TorchDispatchModeTLS;
  using Key = c10::impl::TorchDispatchModeKey;
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::PreDispatch) ||
         Modes::get_mode(Key::FAKE) || Modes::get_mode(Key::PROXY) ||
         Modes::get_mode(Key::FUNCTIONAL);
}

}  // namespace tensorizer
