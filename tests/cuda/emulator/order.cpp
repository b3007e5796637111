// The order of operations, which comes from streams, from events, and from waits of the host. Two
// operations on the same memory, of which one writes, must be ordered by these: if they are not,
// that is a race, even if they happen to run in the right order.
#include <algorithm>

#include "emulator.h"

namespace emulator {

namespace {

bool is_before(const Pending& operation, const Clock& clock) {
  const auto stream = static_cast<size_t>(operation.stream->number);
  return stream < clock.size() && operation.number <= clock[stream];
}

Extents extents_of(const std::vector<Access>& accesses) {
  Extents extents;
  for (const auto& access : accesses) {
    u64 &begin = extents.begin[access.host], &end = extents.end[access.host];
    begin = std::min(begin, access.begin);
    end = std::max(end, access.end);
  }
  return extents;
}

// Batches have thousands of accesses, and most pairs of them nothing in common.
bool overlap(const Extents& one, const Extents& other) {
  return (one.begin[0] < other.end[0] && other.begin[0] < one.end[0]) ||
         (one.begin[1] < other.end[1] && other.begin[1] < one.end[1]);
}

void check_race(const Stream& stream, const Operation& operation, const Pending& other) {
  for (const auto& mine : operation.accesses) {
    for (const auto& theirs : other.accesses) {
      if (mine.host != theirs.host || !(mine.write || theirs.write)) continue;
      if (mine.begin >= theirs.end || theirs.begin >= mine.end) continue;
      problem(
          "race: %s on stream %d of device %d does not wait for an earlier %s on stream %d of "
          "device %d: %llx..%llx and %llx..%llx (%s)",
          operation.what, stream.number, stream.device, other.what, other.stream->number,
          other.stream->device, mine.begin, mine.end, theirs.begin, theirs.end,
          mine.host ? "host" : "device");
    }
  }
}

}  // namespace

void merge(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t at = 0; at < other.size(); ++at) clock[at] = std::max(clock[at], other[at]);
}

// All threads of the host count as one: what one of them knows, all do.
void host_knows(const Clock& clock) {
  State& s = state();
  merge(s.before, clock);
  std::erase_if(s.unknown,
                [&](const Pending& operation) { return is_before(operation, s.before); });
}

bool uses(const Pending& operation, u64 begin, u64 end, bool host) {
  return std::ranges::any_of(operation.accesses, [&](const Access& access) {
    return access.host == host && access.begin < end && begin < access.end;
  });
}

// An operation that uses memory, as far as the host can know.
const Pending* unknown_on(u64 begin, u64 end, bool host) {
  const auto& unknown = state().unknown;
  const auto found = std::ranges::find_if(
      unknown, [&](const Pending& operation) { return uses(operation, begin, end, host); });
  return found == unknown.end() ? nullptr : &*found;
}

// Puts an operation that is begun in order, and checks that it is where it must be.
void order(Stream* stream, const Operation& operation) {
  State& s = state();
  merge(stream->before, s.before);
  const Extents extents = extents_of(operation.accesses);
  for (const auto& other : s.unknown) {
    if (other.stream != stream && overlap(extents, other.extents) &&
        !is_before(other, stream->before)) {
      check_race(*stream, operation, other);
    }
  }
  const auto own = static_cast<size_t>(stream->number);
  if (stream->before.size() <= own) stream->before.resize(own + 1);
  stream->before[own] = operation.number;
  if (!operation.accesses.empty()) {
    s.unknown.push_back({operation.number, stream, operation.what, operation.accesses, extents});
  }
}

}  // namespace emulator
