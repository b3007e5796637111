#include "iterate.h"

#include <string>
#include <utility>

#include "errors.h"
#include "tensorizer-torch/bridge.rs.h"

namespace tensorizer {

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

void iterate_close(std::int64_t iterator) {
  checked([&] { op_iterate_close(iterator); });
}

Dict iterate_next(std::int64_t iterator) {
  // Copied first: another thread may end the iterator meanwhile.
  const std::string target(device_of(iterator));
  auto loaded = checked([&] { return op_iterate_next(iterator); });
  const auto device = target.empty() ? OptionalDevice() : OptionalDevice(at::Device(target));
  Names keys;
  for (std::size_t at = 0; at < loaded->size(); ++at) keys.emplace_back(loaded->name(at));
  return by_name(std::move(keys), place(*loaded, device));
}

}  // namespace tensorizer
