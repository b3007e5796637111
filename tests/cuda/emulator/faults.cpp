// Calls that fail, and calls that do nothing, as the environment says.
#include <stdlib.h>

#include <algorithm>

#include "emulator.h"

namespace emulator {

namespace {

struct Fault {
  std::string call;
  int code;
  u64 from, to;
};

std::vector<Fault> faults;

struct Mutation {
  std::string call, where;
  u64 each = 1, seen = 0;

  explicit Mutation(std::string text) {
    if (const auto slash = text.find('/'); slash != std::string::npos) {
      each = strtoull(text.c_str() + slash + 1, nullptr, 10);
      text.resize(slash);
    }
    const auto colon = text.find(':');
    call = text.substr(0, colon);
    if (colon != std::string::npos) where = text.substr(colon + 1);
  }
};

}  // namespace

// name=code, name=code@3, name=code@3- or name=code@3-5, with semicolons between.
void add_faults(const char* rules) {
  const std::string all = rules;
  for (size_t at = 0; at < all.size();) {
    const size_t end = std::min(all.find(';', at), all.size());
    const std::string rule = all.substr(at, end - at);
    at = end + 1;
    const size_t equals = rule.find('='), sign = rule.find('@');
    if (equals == std::string::npos) continue;
    Fault fault{rule.substr(0, equals), atoi(rule.c_str() + equals + 1), 1, ~0ull};
    if (sign != std::string::npos) {
      char* rest = nullptr;
      fault.from = fault.to = strtoull(rule.c_str() + sign + 1, &rest, 10);
      if (*rest == '-') fault.to = rest[1] ? strtoull(rest + 1, nullptr, 10) : ~0ull;
    }
    faults.push_back(fault);
  }
}

void clear_faults() { faults.clear(); }

int fault(const char* call) {
  const u64 count = ++state().calls[call];
  for (const auto& fault : faults) {
    if (fault.call == call && count >= fault.from && count <= fault.to) return fault.code;
  }
  return 0;
}

// True if FAKE_CUDA_MUTATE has this call do nothing.
bool dropped(const char* call, const char* where) {
  static Mutation mutation(getenv("FAKE_CUDA_MUTATE") ? getenv("FAKE_CUDA_MUTATE") : "");
  if (mutation.call != call || mutation.where != where) return false;
  return ++mutation.seen % mutation.each == 0;
}

}  // namespace emulator
