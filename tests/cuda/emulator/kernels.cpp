// The few kernels of torch that are emulated: fill, `* number`, `+` and casts between floating
// types of contiguous tensors, copies of any strides, and torch.cuda._sleep.
#include <cxxabi.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <array>

#include "emulator.h"

namespace emulator {

namespace {

template <typename T>
T load(const void* from, u64 at = 0) {
  T value;
  memcpy(&value, static_cast<const char*>(from) + at, sizeof value);
  return value;
}

template <typename T>
void store(void* to, u64 at, T value) {
  memcpy(static_cast<char*>(to) + at, &value, sizeof value);
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

// The arguments of the template that begins with `open`.
std::string arguments_of(const std::string& text, const std::string& open) {
  const size_t found = text.find(open);
  if (found == std::string::npos) return "";
  const size_t from = found + open.size();
  size_t to = from;
  for (int depth = 1; to < text.size(); ++to) {
    if (text[to] == '<') ++depth;
    if (text[to] == '>' && --depth == 0) break;
  }
  return text.substr(from, to - from);
}

size_t width_of(const std::string& type) {
  static const std::map<std::string, size_t> widths = {{"unsigned char", 1},
                                                       {"signed char", 1},
                                                       {"char", 1},
                                                       {"bool", 1},
                                                       {"short", 2},
                                                       {"unsigned short", 2},
                                                       {"int", 4},
                                                       {"unsigned int", 4},
                                                       {"long", 8},
                                                       {"unsigned long", 8},
                                                       {"float", 4},
                                                       {"double", 8},
                                                       {"c10::Half", 2},
                                                       {"c10::BFloat16", 2},
                                                       {"c10::complex<float>", 8},
                                                       {"c10::complex<double>", 16}};
  const auto found = widths.find(type);
  return found == widths.end() ? 0 : found->second;
}

// Numbers of c10::ScalarType.
enum { kHalf = 5, kFloat = 6, kDouble = 7, kBFloat16 = 15, kFloat8e4m3fn = 24 };

u64 width_of_float(int type) {
  switch (type) {
    case kFloat8e4m3fn:
      return 1;
    case kHalf:
    case kBFloat16:
      return 2;
    case kFloat:
      return 4;
    case kDouble:
      return 8;
    default:
      return 0;
  }
}

double load_float8(unsigned byte) {
  const int exponent = static_cast<int>(byte >> 3 & 15), mantissa = static_cast<int>(byte & 7);
  double value =
      exponent ? __builtin_ldexp(8 + mantissa, exponent - 10) : __builtin_ldexp(mantissa, -9);
  if ((byte & 127) == 127) value = __builtin_nan("");
  return byte & 128 ? -value : value;
}

double load_float(const char* from, int type) {
  switch (type) {
    case kFloat8e4m3fn:
      return load_float8(load<uint8_t>(from));
    case kHalf:
      return load<_Float16>(from);
    case kFloat:
      return load<float>(from);
    case kDouble:
      return load<double>(from);
    default: {
      const uint32_t bits = static_cast<uint32_t>(load<uint16_t>(from)) << 16;
      return load<float>(&bits);
    }
  }
}

uint16_t to_bfloat16(float value) {
  const auto bits = load<uint32_t>(&value);
  if (value != value) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

void store_float(char* to, int type, double value) {
  if (type == kHalf) store(to, 0, static_cast<_Float16>(static_cast<float>(value)));
  if (type == kFloat) store(to, 0, static_cast<float>(value));
  if (type == kDouble) store(to, 0, value);
  if (type == kBFloat16) store(to, 0, to_bfloat16(static_cast<float>(value)));
}

// Arguments of an elementwise kernel: the number of elements, a functor, pointers, and more.
class Elementwise {
 public:
  Elementwise(void** args, Operation* operation) : args_(args), operation_(operation) {}

  u64 count() const { return static_cast<u64>(load<int>(args_[0])); }
  const void* functor() const { return args_[1]; }
  char* writes(u64 pointer, u64 width) { return use(pointer, width, true); }
  const char* reads(u64 pointer, u64 width) { return use(pointer, width, false); }

  // Has the operation call `each` with every number from 0 to the count.
  template <typename F>
  bool run(const char* what, F&& each) {
    operation_->what = what;
    operation_->run = [count = count(), each] {
      for (u64 i = 0; i < count; ++i) each(i);
    };
    return true;
  }

 private:
  char* use(u64 pointer, u64 width, bool write) {
    const u64 start = load<u64>(args_[2], pointer * 8);
    operation_->accesses.push_back({start, start + count() * width, write, false});
    return backing_of(start);
  }

  void** args_;
  Operation* operation_;
};

bool cast(Elementwise kernel, int from_type, int to_type) {
  const u64 from_width = width_of_float(from_type), to_width = width_of_float(to_type);
  if (!from_width || !to_width || to_type == kFloat8e4m3fn) return false;
  char* to = kernel.writes(0, to_width);
  const char* from = kernel.reads(1, from_width);
  return kernel.run("cast", [=](u64 i) {
    store_float(to + i * to_width, to_type, load_float(from + i * from_width, from_type));
  });
}

bool fill(Elementwise kernel, const std::string& type) {
  const size_t width = width_of(type);
  if (!width) return false;
  std::array<char, 16> value{};
  memcpy(value.data(), kernel.functor(), width);
  char* to = kernel.writes(0, width);
  return kernel.run("fill", [=](u64 i) { memcpy(to + i * width, value.data(), width); });
}

bool multiply(Elementwise kernel) {
  const auto factor = load<float>(kernel.functor(), 4);
  char* to = kernel.writes(0, 4);
  const char* from = kernel.reads(1, 4);
  return kernel.run("mul", [=](u64 i) { store(to, i * 4, load<float>(from, i * 4) * factor); });
}

bool add(Elementwise kernel) {
  const auto alpha = load<float>(kernel.functor());
  char* to = kernel.writes(0, 4);
  const char *left = kernel.reads(1, 4), *right = kernel.reads(2, 4);
  return kernel.run("add", [=](u64 i) {
    store(to, i * 4, load<float>(left, i * 4) + alpha * load<float>(right, i * 4));
  });
}

bool add_number(Elementwise kernel) {
  const auto number = load<float>(kernel.functor()) * load<float>(kernel.functor(), 4);
  char* to = kernel.writes(0, 4);
  const char* from = kernel.reads(1, 4);
  return kernel.run("add", [=](u64 i) { store(to, i * 4, load<float>(from, i * 4) + number); });
}

// The type of the elements in the name of a kernel, from `lambda(float)` for instance.
std::string element_type(const std::string& name) {
  const std::string open = "{lambda(";
  size_t found = name.find(open);
  while (found != std::string::npos && name[found + open.size()] == ')') {
    found = name.find(open, found + 1);
  }
  if (found == std::string::npos) return "";
  const size_t from = found + open.size();
  return name.substr(from, name.find(')', from) - from);
}

// A copy between tensors of any strides. What torch's gpu_kernel_impl_nocast captures is an
// OffsetCalculator and the two addresses: the number of dimensions; for each a divisor, which
// begins with its size; for each the strides of both tensors, in bytes.
bool copy_strided(u64 count, const void* captured, size_t width, Operation* operation) {
  constexpr u64 kMostDimensions = 25, kSizes = 4, kDivisor = 12;
  constexpr u64 kStrides = kSizes + kMostDimensions * kDivisor;
  constexpr u64 kAddresses = kStrides + kMostDimensions * 8;
  const auto dimensions = load<unsigned>(captured);
  if (!width || dimensions > kMostDimensions) return false;
  std::vector<std::array<u64, 3>> shape;  // size, and stride of each tensor
  std::array<u64, 2> span = {width, width};
  for (u64 d = 0; d < dimensions; ++d) {
    const u64 size = load<unsigned>(captured, kSizes + d * kDivisor);
    const u64 to = load<unsigned>(captured, kStrides + d * 8);
    const u64 from = load<unsigned>(captured, kStrides + d * 8 + 4);
    shape.push_back({size, to, from});
    span[0] += (size - 1) * to;
    span[1] += (size - 1) * from;
  }
  const auto to = load<u64>(captured, kAddresses), from = load<u64>(captured, kAddresses + 8);
  char *destination = backing_of(to), *source = backing_of(from);
  if (!destination || !source) return false;
  operation->what = "strided copy";
  operation->accesses.push_back({to, to + span[0], true, false});
  operation->accesses.push_back({from, from + span[1], false, false});
  operation->run = [=] {
    for (u64 i = 0; i < count; ++i) {
      u64 rest = i, to_offset = 0, from_offset = 0;
      for (const auto& [size, to_stride, from_stride] : shape) {
        to_offset += rest % size * to_stride;
        from_offset += rest % size * from_stride;
        rest /= size;
      }
      memcpy(destination + to_offset, source + from_offset, width);
    }
  };
  return true;
}

}  // namespace

std::string demangle(const char* name) {
  int status = 0;
  char* plain = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  const std::string result = plain ? plain : name;
  free(plain);
  return result;
}

// Has the operation do what the kernel of this name does; false for an unknown one.
bool emulate_kernel(const std::string& name, void** args, Operation* operation) {
  if (contains(name, "spin_kernel")) {
    operation->what = "sleep";
    operation->pause = static_cast<double>(load<long>(args[0])) / 2e9;  // cycles
    return true;
  }
  const Elementwise kernel(args, operation);
  if (contains(name, "unrolled_elementwise_kernel<") && contains(name, "direct_copy_kernel_cuda") &&
      contains(name, "LoadWithCast<1>") && contains(name, "StoreWithCast<1>") &&
      !contains(name, " OffsetCalculator<")) {
    // The last two arguments, the loader and the storer, begin with the types.
    return cast(kernel, load<int8_t>(args[5]), load<int8_t>(args[6]));
  }
  if (contains(name, " at::native::elementwise_kernel<") &&
      contains(name, "gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(")) {
    return copy_strided(kernel.count(), kernel.functor(), width_of(element_type(name)), operation);
  }
  if (!contains(name, "vectorized_elementwise_kernel<")) return false;
  if (contains(name, "FillFunctor<")) return fill(kernel, arguments_of(name, "FillFunctor<"));
  for (const char* functor : {"AUnaryFunctor<", "BUnaryFunctor<"}) {
    const std::string types = arguments_of(name, functor);
    if (types.starts_with("float, float, float") && contains(types, "MulFunctor")) {
      return multiply(kernel);
    }
  }
  if (arguments_of(name, "CUDAFunctor_add<") == "float") return add(kernel);
  if (arguments_of(name, "CUDAFunctorOnSelf_add<") == "float") return add_number(kernel);
  if (contains(name, "lambda(float)")) {
    if (contains(name, "bfloat16_copy_kernel_cuda")) return cast(kernel, kFloat, kBFloat16);
    if (contains(name, "float16_copy_kernel_cuda")) return cast(kernel, kFloat, kHalf);
  }
  return false;
}

}  // namespace emulator
