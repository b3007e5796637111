// CUDA graphs: capture of operations, and what a capture forbids.
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

#include "emulator.h"

namespace emulator {

namespace {

pid_t thread_id() { return static_cast<pid_t>(syscall(SYS_gettid)); }

Graph* as_graph(void* handle) { return static_cast<Graph*>(handle); }

}  // namespace

int forbidden_by_capture() {
  int code = 0;
  if (capture_mode == cudaStreamCaptureModeRelaxed) return code;
  for (Stream* stream : state().capturing) {
    if (stream->mode == cudaStreamCaptureModeRelaxed) continue;
    const bool global =
        stream->mode == cudaStreamCaptureModeGlobal && capture_mode == cudaStreamCaptureModeGlobal;
    if (global || stream->captured_by == thread_id()) {
      stream->invalidated = true;
      code = cudaErrorStreamCaptureUnsupported;
    }
  }
  if (code) note("a call is not permitted during a capture");
  return code;
}

int capture_status(const Stream& stream) {
  if (!stream.graph) return cudaStreamCaptureStatusNone;
  return stream.invalidated ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

}  // namespace emulator

using namespace emulator;

API cudaError_t CUDARTAPI cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  const int before = capture_mode;
  capture_mode = *mode;
  *mode = static_cast<cudaStreamCaptureMode>(before);
  return cudaSuccess;
}

API cudaError_t CUDARTAPI cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return runtime("cudaStreamBeginCapture", [&](Lock&, int device) -> int {
    Stream* stream = stream_of(handle, device);
    if (!stream || stream != static_cast<void*>(handle) || stream->graph) {
      return cudaErrorStreamCaptureUnsupported;
    }
    stream->graph = new Graph{.operations = {}, .number = ++state().graphs};
    stream->invalidated = false;
    stream->mode = mode;
    stream->captured_by = thread_id();
    state().capturing.insert(stream);
    return 0;
  });
}

API cudaError_t CUDARTAPI cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  return runtime("cudaStreamEndCapture", [&](Lock&, int device) -> int {
    Stream* stream = stream_of(handle, device);
    if (!stream || !stream->graph) return cudaErrorIllegalState;
    Graph* captured = std::exchange(stream->graph, nullptr);
    state().capturing.erase(stream);
    *graph = nullptr;
    if (stream->invalidated) {
      delete captured;
      return cudaErrorStreamCaptureInvalidated;
    }
    *graph = reinterpret_cast<cudaGraph_t>(captured);
    return 0;
  });
}

API cudaError_t CUDARTAPI cudaStreamIsCapturing(cudaStream_t handle,
                                                cudaStreamCaptureStatus* status) {
  return runtime("cudaStreamIsCapturing", [&](Lock&, int device) -> int {
    const Stream* stream = stream_of(handle, device);
    if (!stream) return cudaErrorInvalidResourceHandle;
    *status = static_cast<cudaStreamCaptureStatus>(capture_status(*stream));
    return 0;
  });
}

API cudaError_t CUDARTAPI cudaStreamGetCaptureInfo(cudaStream_t handle,
                                                   cudaStreamCaptureStatus* status,
                                                   unsigned long long* id, cudaGraph_t* graph,
                                                   const cudaGraphNode_t** nodes,
                                                   const cudaGraphEdgeData** edges, size_t* count) {
  return runtime("cudaStreamGetCaptureInfo", [&](Lock&, int device) -> int {
    const Stream* stream = stream_of(handle, device);
    if (!stream) return cudaErrorInvalidResourceHandle;
    *status = static_cast<cudaStreamCaptureStatus>(capture_status(*stream));
    if (id) *id = stream->graph ? stream->graph->number : 0;
    if (graph) *graph = reinterpret_cast<cudaGraph_t>(stream->graph);
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return 0;
  });
}

API cudaError_t CUDARTAPI cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable,
                                                        cudaGraph_t graph, unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(new Graph(*as_graph(graph)));
  return cudaSuccess;
}

API cudaError_t CUDARTAPI cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                               unsigned long long flags) {
  return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

API cudaError_t CUDARTAPI cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t handle) {
  return runtime("cudaGraphLaunch", [&](Lock&, int device) -> int {
    Stream* stream = stream_of(handle, device);
    if (!stream) return cudaErrorInvalidResourceHandle;
    for (const auto& operation : as_graph(executable)->operations) submit(stream, operation);
    return 0;
  });
}

API cudaError_t CUDARTAPI cudaGraphDestroy(cudaGraph_t graph) {
  delete as_graph(graph);
  return cudaSuccess;
}

API cudaError_t CUDARTAPI cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete as_graph(executable);
  return cudaSuccess;
}

API cudaError_t CUDARTAPI cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  *count = as_graph(graph)->operations.size();
  return cudaSuccess;
}

API cudaError_t CUDARTAPI cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*,
                                                       cudaGraphEdgeData*, size_t* count) {
  *count = 0;
  return cudaSuccess;
}
