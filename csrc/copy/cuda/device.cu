// Every call is checked and named. A fault of the device is reported by whatever call comes next,
// as CUDA does; the engine then stops for good, so it does not matter whose fault it was.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "copy/cuda/device.h"
#include "copy/stream/kernels.h"

namespace hpkv::cuda {

using stream::Direction;
using stream::EventHandle;
using stream::PageJob;
using stream::PageJobs;
using stream::Span;
using stream::Status;
using stream::StreamHandle;

namespace {

constexpr unsigned kThreads = 256;  // a block

__global__ void __launch_bounds__(kThreads) copy_pages(const __grid_constant__ PageJobs jobs) {
  stream::copy_all_in_block(jobs, blockIdx.x, {threadIdx.x, blockDim.x});
}

Status checked(cudaError_t error, const char* call, int line) {
  if (error == cudaSuccess) return {};
  // Of the file's name, what is ours: the build's folders are nobody's business.
  return Status::failed(
      "copy/cuda/device.cu", line,
      std::string(call) + ": " + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) + ")");
}

#define HPKV_CUDA_CALL(name, ...) checked(name(__VA_ARGS__), #name, __LINE__)

cudaStream_t raw_stream(StreamHandle stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t raw_event(EventHandle event) { return static_cast<cudaEvent_t>(event); }

// Of calls that name a stream, which has a device already. The null stream is the thread's.
constexpr int kAnyDevice = -1;

// Makes `ordinal` the thread's device for a scope: callers' threads come with devices of their own.
class OnDevice {
 public:
  explicit OnDevice(int ordinal) : status_(enter(ordinal)) {}
  ~OnDevice() {
    if (switched_) static_cast<void>(cudaSetDevice(previous_));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  [[nodiscard]] const Status& status() const { return status_; }

 private:
  Status enter(int ordinal) {
    if (ordinal == kAnyDevice) return {};
    if (Status status = HPKV_CUDA_CALL(cudaGetDevice, &previous_); !status.ok()) return status;
    if (previous_ == ordinal) return {};
    Status status = HPKV_CUDA_CALL(cudaSetDevice, ordinal);
    switched_ = status.ok();
    return status;
  }

  int previous_ = 0;
  bool switched_ = false;
  Status status_;  // last: its making sets the others
};

class CudaDevice final : public stream::Device {
 public:
  explicit CudaDevice(int ordinal) : ordinal_(ordinal) {}

  Status enter_thread() override {
    if (Status status = HPKV_CUDA_CALL(cudaSetDevice, ordinal_); !status.ok()) return status;
    // While another thread captures a graph in the default mode, many calls of this one would fail
    // and spoil the capture. Engine threads enqueue on streams of their own, which nobody captures.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    return HPKV_CUDA_CALL(cudaThreadExchangeStreamCaptureMode, &mode);
  }

  Status make_stream(bool urgent, StreamHandle& out) override {
    const OnDevice here(ordinal_);
    if (!here.status().ok()) return here.status();
    int least = 0;
    int greatest = 0;
    if (Status range = HPKV_CUDA_CALL(cudaDeviceGetStreamPriorityRange, &least, &greatest);
        !range.ok()) {
      return range;
    }
    cudaStream_t made = nullptr;
    Status status = HPKV_CUDA_CALL(cudaStreamCreateWithPriority, &made, cudaStreamNonBlocking,
                                   urgent ? greatest : least);
    out = made;
    return status;
  }

  void destroy_stream(StreamHandle stream) noexcept override {
    if (stream != nullptr) static_cast<void>(cudaStreamDestroy(raw_stream(stream)));
  }

  Status make_event(EventHandle& out) override {
    const OnDevice here(ordinal_);
    if (!here.status().ok()) return here.status();
    cudaEvent_t made = nullptr;
    Status status = HPKV_CUDA_CALL(cudaEventCreateWithFlags, &made,
                                   cudaEventDisableTiming | cudaEventBlockingSync);
    out = made;
    return status;
  }

  void destroy_event(EventHandle event) noexcept override {
    if (event != nullptr) static_cast<void>(cudaEventDestroy(raw_event(event)));
  }

  Status record(StreamHandle stream, EventHandle event) override {
    const OnDevice here(stream == nullptr ? ordinal_ : kAnyDevice);
    if (!here.status().ok()) return here.status();
    return HPKV_CUDA_CALL(cudaEventRecord, raw_event(event), raw_stream(stream));
  }

  Status wait(StreamHandle stream, EventHandle event) override {
    const OnDevice here(stream == nullptr ? ordinal_ : kAnyDevice);
    if (!here.status().ok()) return here.status();
    return HPKV_CUDA_CALL(cudaStreamWaitEvent, raw_stream(stream), raw_event(event), 0U);
  }

  Status query(EventHandle event, bool& passed) override {
    const cudaError_t error = cudaEventQuery(raw_event(event));
    passed = error == cudaSuccess;
    return error == cudaErrorNotReady ? Status() : checked(error, "cudaEventQuery", __LINE__);
  }

  Status synchronize(EventHandle event) override {
    return HPKV_CUDA_CALL(cudaEventSynchronize, raw_event(event));
  }

  Status synchronize_stream(StreamHandle stream) override {
    return HPKV_CUDA_CALL(cudaStreamSynchronize, raw_stream(stream));
  }

  Status copy(StreamHandle stream, Direction direction, std::span<const Span> spans) override;

  Status run(StreamHandle stream, std::span<const PageJob> jobs) override {
    if (jobs.empty()) return {};
    PageJobs all;
    std::ranges::copy(jobs, all.job);
    all.count = jobs.size();
    copy_pages<<<stream::kGridBlocksMax, kThreads, 0, raw_stream(stream)>>>(all);
    return checked(cudaGetLastError(), "copy_pages<<<>>>", __LINE__);
  }

  Status allocate_pinned(std::uint64_t bytes, std::byte*& out) override {
    const OnDevice here(ordinal_);
    if (!here.status().ok()) return here.status();
    void* made = nullptr;
    Status status =
        HPKV_CUDA_CALL(cudaHostAlloc, &made, bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    out = static_cast<std::byte*>(made);
    return status;
  }

  void free_pinned(std::byte* memory) noexcept override {
    if (memory != nullptr) static_cast<void>(cudaFreeHost(memory));
  }

  Status register_host(std::byte* memory, std::uint64_t bytes) override {
    const OnDevice here(ordinal_);
    if (!here.status().ok()) return here.status();
    int same_address = 0;
    if (Status status = HPKV_CUDA_CALL(cudaDeviceGetAttribute, &same_address,
                                       cudaDevAttrCanUseHostPointerForRegisteredMem, ordinal_);
        !status.ok()) {
      return status;
    }
    if (same_address == 0) return checked(cudaErrorNotSupported, "cudaHostRegister", __LINE__);
    Status status = HPKV_CUDA_CALL(cudaHostRegister, memory, bytes,
                                   cudaHostRegisterPortable | cudaHostRegisterMapped);
    // A refusal is not to be found again by the next call that asks for the last error.
    if (!status.ok()) static_cast<void>(cudaGetLastError());
    return status;
  }

  void unregister_host(std::byte* memory) noexcept override {
    static_cast<void>(cudaHostUnregister(memory));
  }

  Status upload(std::span<const std::byte> bytes, void*& out) override {
    const OnDevice here(ordinal_);
    if (!here.status().ok()) return here.status();
    void* made = nullptr;
    if (Status got = HPKV_CUDA_CALL(cudaMalloc, &made, bytes.size()); !got.ok()) return got;
    Status status = fill(made, bytes);
    if (!status.ok()) {
      static_cast<void>(cudaFree(made));
      return status;
    }
    out = made;
    return {};
  }

  void free_uploaded(void* memory) noexcept override {
    if (memory != nullptr) static_cast<void>(cudaFree(memory));
  }

 private:
  static Status fill(void* made, std::span<const std::byte> bytes) {
    Status copied =
        HPKV_CUDA_CALL(cudaMemcpy, made, bytes.data(), bytes.size(), cudaMemcpyHostToDevice);
    if (!copied.ok()) return copied;
    // From pageable memory the call may return when the bytes are staged, and streams of ours wait
    // for nothing of the default one.
    return HPKV_CUDA_CALL(cudaStreamSynchronize, cudaStreamLegacy);
  }

  const int ordinal_;
};

#if CUDART_VERSION >= 13000
// One call for the batch. Pinned memory on one side of every span, so the source is read in stream
// order and may change only behind it.
Status CudaDevice::copy(StreamHandle stream, Direction /*direction*/, std::span<const Span> spans) {
  if (spans.empty()) return {};
  std::vector<void*> targets;
  std::vector<const void*> sources;
  std::vector<std::size_t> bytes;
  targets.reserve(spans.size());
  sources.reserve(spans.size());
  bytes.reserve(spans.size());
  for (const Span& span : spans) {
    targets.push_back(span.target);
    sources.push_back(span.source);
    bytes.push_back(span.bytes);
  }
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  // Copy engines where there is a choice: the SMs are the forward pass's.
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  std::size_t first = 0;
  return HPKV_CUDA_CALL(cudaMemcpyBatchAsync, targets.data(), sources.data(), bytes.data(),
                        spans.size(), &attributes, &first, 1, raw_stream(stream));
}
#else
Status CudaDevice::copy(StreamHandle stream, Direction direction, std::span<const Span> spans) {
  const cudaMemcpyKind kind =
      direction == Direction::to_host ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
  for (const Span& span : spans) {
    const Status status = HPKV_CUDA_CALL(cudaMemcpyAsync, span.target, span.source, span.bytes,
                                         kind, raw_stream(stream));
    if (!status.ok()) return status;
  }
  return {};
}
#endif

void require(const Status& status) {
  if (!status.ok()) throw Error(ErrorKind::system, "CUDA device: " + status.text());
}

}  // namespace

int runtime_version() noexcept { return CUDART_VERSION; }

std::unique_ptr<stream::Device> make_device(int ordinal) {
  int driver = 0;
  require(HPKV_CUDA_CALL(cudaDriverGetVersion, &driver));
  if (driver == 0) throw Error(ErrorKind::system, "CUDA device: no CUDA driver is installed");
  int count = 0;
  require(HPKV_CUDA_CALL(cudaGetDeviceCount, &count));
  if (ordinal < 0 || ordinal >= count) {
    throw Error(ErrorKind::system, "CUDA device: ordinal " + std::to_string(ordinal) +
                                       " is not in [0, " + std::to_string(count) + ")");
  }
  int same_addresses = 0;
  require(HPKV_CUDA_CALL(cudaDeviceGetAttribute, &same_addresses, cudaDevAttrUnifiedAddressing,
                         ordinal));
  if (same_addresses == 0) {
    throw Error(ErrorKind::system, "CUDA device: device " + std::to_string(ordinal) +
                                       " does not share the host's addresses");
  }
  // Kernels are loaded at their first launch otherwise, and that waits for work of other streams.
  const OnDevice here(ordinal);
  require(here.status());
  cudaFuncAttributes attributes{};
  require(HPKV_CUDA_CALL(cudaFuncGetAttributes, &attributes,
                         reinterpret_cast<const void*>(&copy_pages)));
  return std::make_unique<CudaDevice>(ordinal);
}

}  // namespace hpkv::cuda
