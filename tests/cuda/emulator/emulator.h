// Declarations that the files of the emulator share. All state is guarded by the one lock in it.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <sys/types.h>
#include <time.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace emulator {

using u64 = unsigned long long;
using Lock = std::unique_lock<std::mutex>;

constexpr u64 kAddressSpace = 1ull << 40;  // of a device, whose addresses are never used twice
constexpr int kMaxDevices = 8;

struct Stream;

// The last operation of each stream, by its number, that has happened before something.
using Clock = std::vector<u64>;

// A range of memory that an operation uses.
struct Access {
  u64 begin, end;
  bool write, host;
};

// One recording of an event. Streams that wait for it keep to it when the event is recorded anew.
struct Record {
  bool completed = false;
  timespec time{};
  double completed_at = 0;  // simulated time, see bus.cpp
};

struct Event {
  int device;
  std::shared_ptr<Record> last;  // null before the first record
  Clock before;
  const char* after = "";  // what the stream did before, see Stream::last
  bool destroyed = false;
  u64 captured_by = 0;  // the number of a graph
};

struct Operation {
  const char* what = "";
  std::function<void()> run;
  std::vector<Access> accesses;
  std::shared_ptr<Record> wait_for, record;
  u64 number = 0;  // in the order in which operations were begun
  bool copy = false;
  double pause = 0;                          // seconds
  u64 upload_bytes = 0, download_bytes = 0;  // over the bus
  double begun = 0;                          // time of the call; 0 if no bus is simulated
};

// A captured graph.
struct Graph {
  std::vector<Operation> operations;
  u64 number = 0;
};

struct Stream {
  int device;
  int number;
  bool own;               // made by the driver's API, as tensorizer's are; torch uses the other
  const char* last = "";  // "upload", "download" or "wait", whichever was begun last
  Clock before;           // the next operation
  std::deque<Operation> queue;
  std::condition_variable todo;
  std::mt19937_64 random;
  double ready_at = 0;  // simulated time at which the last operation has ended, see bus.cpp
  bool destroyed = false;
  // Capture
  Graph* graph = nullptr;
  bool invalidated = false;
  int mode = 0;
  pid_t captured_by = 0;
};

struct Context {
  int device;
};

struct Allocation {
  u64 len;
  bool live;
};

struct Device {
  int id;
  u64 base = 0;             // of the addresses that programs see
  char* backing = nullptr;  // where the bytes are
  int memfd = -1;
  u64 next = 0, used = 0, peak = 0;
  std::map<u64, Allocation> allocations;
  Context context;
  int retained = 0;
  bool active = false;
  Stream* null_stream = nullptr;
  std::vector<Stream*> streams;
  int sticky_error = 0;
  double upload_free_at = 0, download_free_at = 0;  // simulated times at which the bus is free
};

struct PinnedRange {
  u64 len;
  bool allocated;  // by cudaHostAlloc
};

// The smallest ranges that contain all accesses of an operation, of device and of host memory.
struct Extents {
  u64 begin[2] = {UINT64_MAX, UINT64_MAX}, end[2] = {0, 0};
};

// The part of an operation under way that the checks need.
struct Pending {
  u64 number;
  Stream* stream;
  const char* what;
  std::vector<Access> accesses;
  Extents extents;
};

// README.md says what they mean.
struct Settings {
  int devices;
  u64 memory, seed, delay;
  bool log, strict, poison, check_source, free_copies, report, backtrace;
  // In seconds, `bandwidth` in bytes per second. 0: no cost, no limit.
  double bandwidth, copy_latency, call_cost, pin_cost_per_mib, malloc_cost;
  bool shared_bus, populate_pinned, no_batch;
};

// Use of the simulated bus since the last reset, in both directions and on all devices.
struct BusCounters {
  u64 bytes = 0;
  double busy = 0;             // seconds
  double first = 0, last = 0;  // simulated times at which the first copy started and the last ended
};

struct State {
  std::mutex lock;
  std::condition_variable progress;  // an operation has ended
  std::atomic<pid_t> owner{0};       // the process that has begun: a child of it has no CUDA
  Settings settings{};
  std::array<Device, kMaxDevices> devices;
  std::map<u64, PinnedRange> pinned;
  std::map<u64, Pending> pending;
  std::vector<Pending> unknown;     // of which the host does not know that they have ended
  Clock before;                     // what the host begins next
  std::set<void*> streams, events;  // destroyed ones too
  std::set<Stream*> capturing;
  u64 operations = 0, graphs = 0, problems = 0;
  u64 pinned_bytes = 0, pinned_peak = 0;
  BusCounters bus;
  std::map<std::string, u64> calls, statistics, unknown_kernels;
};

State& state();

// The stack of contexts of a thread, as in CUDA.
struct Contexts {
  std::vector<Context*> stack;
  long pushed = 0;
  ~Contexts();
};
extern thread_local Contexts contexts;
extern thread_local int last_error;
extern thread_local int capture_mode;

// start.cpp
bool start();  // false in a child after a fork
u64 number_of(const char* variable, u64 otherwise);

// bus.cpp
double now();             // seconds of CLOCK_MONOTONIC
bool bus_is_simulated();  // by the settings
void take_bus_time(Lock& lock, Stream& stream, const Operation& operation, bool paused);

// costs.cpp
void spend(Lock& lock, double seconds);  // keeps the calling thread busy, without the lock
void spend_call(const char* call);
void spend_pin(Lock& lock, u64 address, u64 len);

// report.cpp
void note(const char* format, ...) __attribute__((format(printf, 1, 2)));
void problem(const char* format, ...) __attribute__((format(printf, 1, 2)));
void report_at_exit();

// faults.cpp
void add_faults(const char* rules);
void clear_faults();
int fault(const char* call);  // counts the call; gives the code with which it is to fail, or 0
bool dropped(const char* call, const char* where = "");

// memory.cpp
void map_device(Device& device, int id);
Device* device_of(u64 address);
char* backing_of(u64 address);
bool is_live(u64 address, u64 len, u64* base = nullptr, u64* size = nullptr);
int allocate(Lock& lock, u64* address, u64 len, int device);
int deallocate(Lock& lock, u64 address);
int deallocate_in_order(u64 address, void* stream, int device);  // as cudaFreeAsync

// pinned.cpp
enum class HostMemory { kPageable, kPinned, kPartlyPinned };
HostMemory host_memory(u64 address, u64 len);
int pin(Lock& lock, u64 address, u64 len, bool allocated = false);
int unpin(Lock& lock, u64 address, bool allocated = false);
int allocate_pinned(Lock& lock, void** address, u64 len);

// checks.cpp
bool is_pending(u64 begin, u64 end, bool host);
void check_lifetimes(const Operation& operation);
u64 checksum(const void* bytes, u64 len);

// order.cpp
void merge(Clock& clock, const Clock& other);
void host_knows(const Clock& clock);
void order(Stream* stream, const Operation& operation);
bool uses(const Pending& operation, u64 begin, u64 end, bool host);
const Pending* unknown_on(u64 begin, u64 end, bool host);

// streams.cpp
Stream* new_stream(int device, bool own);
Stream* null_stream(int device);
Stream* stream_of(void* handle, int device);  // null, after a problem, if there is none
int destroy_stream(void* handle, int device);
u64 submit(Stream* stream, Operation operation);
void wait_until_done(Lock& lock, Stream* stream, u64 number);
void drain_device(Lock& lock, int device);
int synchronize_stream(Lock& lock, void* handle, int device);
int query_stream(void* handle, int device);
int launch_host_function(void* stream, int device, std::function<void()> call);

// copies.cpp
// The time at which a copy reads its source.
enum class SourceOrder {
  kByMemory,    // pinned: in the order of the stream; pageable: during the call
  kStream,      // in the order of the stream: the call waits if the memory is pageable
  kDuringCall,  // before the call returns
  kAny,         // until the copy has ended
};
struct BatchCopy {
  u64 to, from, len;
  SourceOrder order;
};
int copy(Lock& lock, u64 to, u64 from, u64 len, void* stream, int device, bool blocking,
         const char* what);
int copy_batch(Lock& lock, const std::vector<BatchCopy>& copies, void* stream, int device,
               u64* failed);
int set_memory(Lock& lock, u64 to, unsigned pattern, int width, u64 count, void* stream, int device,
               bool blocking);

// events.cpp
Event* event_of(void* handle);  // null, after a problem, if there is none
int new_event(void** handle, int device);
int destroy_event(void* handle);
int record_event(void* handle, void* stream, int device);
int wait_for_event(void* stream, void* handle, int device);
bool is_pending(const Event& event);
int query_event(void* handle);
int synchronize_event(Lock& lock, void* handle);

// capture.cpp
int forbidden_by_capture();  // an error during a capture that concerns this thread, which it spoils
int capture_status(const Stream& stream);

// kernels.cpp
std::string demangle(const char* name);
bool emulate_kernel(const std::string& name, void** args, Operation* operation);

// device.cpp
Context* current_context(bool make_one);
int attribute(int which);
const char* error_name(int code);
const char* error_text(int code);

// driver_device.cpp
void* entry_point(const char* symbol, int version);  // that of CUDA `version`, such as 13000

// A call of the driver: counts it and gives it the lock.
template <typename F>
CUresult driver_anywhere(const char* name, F&& call) {
  if (!start()) return CUDA_ERROR_NOT_INITIALIZED;
  spend_call(name);
  Lock lock(state().lock);
  if (int code = fault(name)) return static_cast<CUresult>(code);
  if (dropped(name)) return CUDA_SUCCESS;
  return static_cast<CUresult>(call(lock));
}

// The same for a call that needs a current context, of whose device it gets the number.
template <typename F>
CUresult driver(const char* name, F&& call) {
  return driver_anywhere(name, [&](Lock& lock) -> int {
    Context* context = current_context(false);
    return context ? call(lock, context->device) : CUDA_ERROR_INVALID_CONTEXT;
  });
}

// A call of the run time, whose errors are remembered.
template <typename F>
cudaError_t runtime(const char* name, F&& call) {
  if (!start()) return static_cast<cudaError_t>(last_error = cudaErrorInitializationError);
  spend_call(name);
  Lock lock(state().lock);
  int code = fault(name);
  if (code == 0) code = call(lock, current_context(true)->device);
  if (code != 0) last_error = code;
  return static_cast<cudaError_t>(code);
}

inline u64 as_address(const void* pointer) { return reinterpret_cast<u64>(pointer); }

}  // namespace emulator

// cufile.cpp is another library.
API char* fake_cuda_direct(unsigned long long address, unsigned long long len);
API int fake_cuda_current_device();
