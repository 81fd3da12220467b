// A CUDA runtime and driver, cuBLAS and NCCL for a machine without a GPU: memory is the host's and copies are made, but
// kernels compute nothing. Everything is counted: launches, copies, waits of the host, contexts, what is illegal.
// Preloaded, it comes before the libraries that PyTorch links. gpu.py builds it and adds functions that do nothing.
// What it is, the environment says: FAKE_GPUS (1), FAKE_CAPABILITY (90), FAKE_DRIVER (13000: of CUDA 13.0), FAKE_BUSY
// (somebody has the GPUs for himself), FAKE_USED (bytes that others have of each), FAKE_US (microseconds of a kernel).
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>
#define RT(name, ...) extern "C" cudaError_t name(__VA_ARGS__)
#define DR(name, ...) extern "C" CUresult name(__VA_ARGS__)

namespace {
enum Kind { DEVICE, PINNED };
struct Block { size_t size; int device; Kind kind; };
struct Stream { int device; bool capturing; double done = 0; };  // done: when its kernels are, in seconds
struct Event { int device; double done = 0; };
struct State {
  std::recursive_mutex mutex;
  std::map<std::string, long> counts;
  std::map<const void*, std::string> kernels;
  std::map<uintptr_t, Block> blocks;
  size_t used[8] = {}, most_used[8] = {};
  bool context[8] = {};
};
State& state() { static auto* s = new State; return *s; }  // outlives what runs at exit
using Lock = std::lock_guard<std::recursive_mutex>;
const size_t TOTAL = 85017493504;  // bytes of an H100
long setting(const char* name, long otherwise) { return getenv(name) ? atol(getenv(name)) : otherwise; }
int num_devices() { static int n = setting("FAKE_GPUS", 1); return n; }
int driver() { static int n = setting("FAKE_DRIVER", 13000); return n; }
int capability() { static int n = setting("FAKE_CAPABILITY", 90); return n; }
size_t used_by_others() { static size_t n = setting("FAKE_USED", 600000000); return n; }
double kernel_seconds() { static double s = setting("FAKE_US", 0) * 1e-6; return s; }
const int MOST_QUEUED = 1024;  // kernels; a launch beyond waits for one to end
thread_local int current = 0, captures = 0;
thread_local cudaError_t last_error = cudaSuccess;
bool tells_waits = false;

void count(const std::string& what, long n = 1) { Lock lock(state().mutex); state().counts[what] += n; }
void touch() { state().context[current] = true; }
void forbid(const std::string& what) { count("ILLEGAL " + what); }
void forbid_in_capture(const std::string& what) { if (captures) forbid(what + " while a stream is captured"); }
double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }
void sleep_until(double when) {
  double left = when - now();
  if (left > 0) usleep(left * 1e6);
}
Stream& stream_of(cudaStream_t s) {  // a device's own where there is none
  static Stream own[8] = {{0}, {1}, {2}, {3}, {4}, {5}, {6}, {7}};
  return (uintptr_t)s < 16 ? own[current] : *(Stream*)s;
}
double& all_done() { static double done[8]; return done[current]; }
void queue(cudaStream_t s, int kernels) {
  if (!kernel_seconds() || stream_of(s).capturing) return;
  double& done = stream_of(s).done;
  done = std::max(done, now()) + kernels * kernel_seconds();
  all_done() = std::max(all_done(), done);
  sleep_until(done - MOST_QUEUED * kernel_seconds());
}
void wait(const std::string& what, double until) {  // count a wait of the host, and tell where it was if asked to
  sleep_until(until);
  count("WAIT " + what);
  forbid_in_capture(what);
  if (!tells_waits) return;
  auto thread = (void* (*)())dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState");
  auto dump = (void (*)(int, void*))dlsym(RTLD_DEFAULT, "_Py_DumpTraceback");
  fprintf(stderr, "waits in %s\n", what.c_str());
  if (thread && dump && thread()) dump(2, thread());
}
Stream* real(cudaStream_t s) { return (uintptr_t)s < 16 ? nullptr : (Stream*)s; }
const Block* find(const void* p) {
  auto next = state().blocks.upper_bound((uintptr_t)p);
  if (next == state().blocks.begin()) return nullptr;
  auto& [start, block] = *--next;
  return (uintptr_t)p < start + block.size ? &block : nullptr;
}
void* map_memory(size_t n, int protection) {
  void* p = mmap(nullptr, n, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : p;
}
bool take(int device, size_t n) {
  size_t &used = state().used[device], &most = state().most_used[device];
  if (used + n > TOTAL - used_by_others()) return false;
  used += n;
  if (used > most) most = used;
  return true;
}
cudaError_t allocate(void** p, size_t n, Kind kind, const char* name) {
  if (getenv("FAKE_BUSY")) return last_error = cudaErrorDevicesUnavailable;
  touch();
  forbid_in_capture(name);
  count(name);
  n = (n + 4096) / 4096 * 4096;
  Lock lock(state().mutex);
  if (kind == DEVICE && !take(current, n)) return last_error = cudaErrorMemoryAllocation;
  *p = map_memory(n, PROT_READ | PROT_WRITE);
  state().blocks[(uintptr_t)*p] = {n, current, kind};
  return cudaSuccess;
}
cudaError_t release(void* p, const char* name) {
  if (!p) return cudaSuccess;
  forbid_in_capture(name);
  Lock lock(state().mutex);
  auto found = state().blocks.find((uintptr_t)p);
  if (found == state().blocks.end()) return cudaSuccess;
  munmap(p, found->second.size);
  if (found->second.kind == DEVICE) state().used[found->second.device] -= found->second.size;
  state().blocks.erase(found);
  return cudaSuccess;
}
cudaError_t launch(const void* f, dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  touch();
  queue(stream, 1);
  bool fits = grid.x && grid.y && grid.z && grid.y < 65536 && grid.z < 65536 && grid.x < 1u << 31;
  fits = fits && block.x && block.x * block.y * block.z <= 1024 && shared <= 232448;
  if (!fits) forbid("launch of an impossible size");
  if (real(stream) && real(stream)->device != current) forbid("launch on another device's stream");
  Lock lock(state().mutex);
  auto name = state().kernels.find(f);
  count("LAUNCH " + (name == state().kernels.end() ? std::string("?") : name->second));
  count("launches");
  return cudaSuccess;
}
cudaError_t copy(void* to, const void* from, size_t n, cudaStream_t stream, bool async) {
  touch();
  auto name = [](const void* p) {
    Lock lock(state().mutex);
    auto block = find(p);
    return std::string(!block ? "pageable" : block->kind == PINNED ? "pinned" : "device");
  };
  std::string source = name(from), target = name(to), what = source + " to " + target;
  count("COPY " + what);
  count("BYTES " + what, n);
  bool pageable = source == "pageable" || target == "pageable";
  if ((source == "device" || target == "device") && (!async || pageable)) wait("copy " + what, stream_of(stream).done);
  memcpy(to, from, n);
  return cudaSuccess;
}
}  // namespace

extern "C" void fake_reset() { Lock lock(state().mutex); state().counts.clear(); }
extern "C" void fake_tell_waits(int on) { tells_waits = on; }
extern "C" size_t fake_most_used(int device) { return state().most_used[device]; }
extern "C" void fake_counts(char* out, size_t size) {
  Lock lock(state().mutex);
  std::string text;
  for (int device = 0; device < 8; device++)
    if (state().context[device]) text += "1\tcontext on " + std::to_string(device) + "\n";
  for (auto& [what, n] : state().counts) text += std::to_string(n) + "\t" + what + "\n";
  snprintf(out, size, "%s", text.c_str());
}

// Kernels, as nvcc's code registers and launches them
extern "C" void** __cudaRegisterFatBinary(void*) { static void* handle[2]; return handle; }
extern "C" void __cudaRegisterFunction(void**, const char* f, char*, const char* name, int, uint3*, uint3*, dim3*,
                                       dim3*, int*) {
  Lock lock(state().mutex);
  state().kernels[f] = name;
}
struct Call { dim3 grid, block; size_t shared; void* stream; };
static std::vector<Call>& calls() { thread_local std::vector<Call> c; return c; }
extern "C" unsigned __cudaPushCallConfiguration(dim3 g, dim3 b, size_t n, CUstream_st* s) {
  calls().push_back({g, b, n, s});
  return 0;
}
extern "C" cudaError_t __cudaPopCallConfiguration(dim3* g, dim3* b, size_t* n, void* s) {
  auto call = calls().back();
  calls().pop_back();
  *g = call.grid, *b = call.block, *n = call.shared, *(void**)s = call.stream;
  return cudaSuccess;
}
extern "C" cudaError_t __cudaGetKernel(cudaKernel_t* k, const void* f) { *k = (cudaKernel_t)f; return cudaSuccess; }
extern "C" cudaError_t __cudaLaunchKernel(cudaKernel_t k, dim3 g, dim3 b, void**, size_t n, cudaStream_t s) {
  return launch((const void*)k, g, b, n, s);
}
RT(cudaLaunchKernel, const void* f, dim3 g, dim3 b, void**, size_t n, cudaStream_t s) { return launch(f, g, b, n, s); }
RT(cudaLaunchCooperativeKernel, const void* f, dim3 g, dim3 b, void**, size_t n, cudaStream_t s) {
  return launch(f, g, b, n, s);
}
RT(cudaLaunchKernelExC, const cudaLaunchConfig_t* c, const void* f, void**) {
  return launch(f, c->gridDim, c->blockDim, c->dynamicSmemBytes, c->stream);
}
DR(cuLaunchKernel, CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
   unsigned n, CUstream s, void**, void**) {
  return (CUresult)launch(f, {gx, gy, gz}, {bx, by, bz}, n, (cudaStream_t)s);
}
DR(cuLaunchKernelEx, const CUlaunchConfig* c, CUfunction f, void**, void**) {
  return cuLaunchKernel(f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                        c->sharedMemBytes, c->hStream, nullptr, nullptr);
}
static CUresult load(CUmodule* module) { *module = (CUmodule)64; count("cuModuleLoadData"); return CUDA_SUCCESS; }
DR(cuModuleLoadData, CUmodule* module, const void*) { return load(module); }
DR(cuModuleLoadDataEx, CUmodule* module, const void*, unsigned, CUjit_option*, void**) { return load(module); }
DR(cuModuleLoad, CUmodule* module, const char*) { return load(module); }
DR(cuModuleGetFunction, CUfunction* f, CUmodule, const char* name) {
  Lock lock(state().mutex);
  *f = (CUfunction)malloc(8);
  state().kernels[*f] = name;
  return CUDA_SUCCESS;
}
DR(cuFuncGetAttribute, int* value, CUfunction_attribute a, CUfunction) {
  *value = a == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}
RT(cudaFuncGetAttributes, cudaFuncAttributes* a, const void*) {
  *a = {};
  a->maxThreadsPerBlock = 1024, a->numRegs = 64, a->ptxVersion = a->binaryVersion = 90;
  a->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}
RT(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, int* n, const void*, int block, size_t, unsigned) {
  *n = block < 64 ? 32 : 2048 / block;
  return cudaSuccess;
}
RT(cudaOccupancyMaxActiveBlocksPerMultiprocessor, int* n, const void* f, int block, size_t shared) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(n, f, block, shared, 0);
}
DR(cuOccupancyMaxActiveBlocksPerMultiprocessor, int* n, CUfunction, int, size_t) { *n = 2; return CUDA_SUCCESS; }

// Devices: H100s
RT(cudaGetDeviceCount, int* n) {
  const char* visible = getenv("CUDA_VISIBLE_DEVICES");  // a list, of which the length counts
  int shown = !visible ? num_devices() : *visible ? 1 + std::count(visible, visible + strlen(visible), ',') : 0;
  *n = driver() < 13000 ? 0 : std::min(shown, num_devices());
  return *n ? cudaSuccess : last_error = driver() < 13000 ? cudaErrorInsufficientDriver : cudaErrorNoDevice;
}
RT(cudaGetDevice, int* d) { *d = current; return cudaSuccess; }
RT(cudaSetDevice, int d) {
  if (d < 0 || d >= num_devices()) return cudaErrorInvalidDevice;
  current = d;
  touch();
  return cudaSuccess;
}
RT(cudaDeviceGetAttribute, int* value, cudaDeviceAttr a, int) {
  static const std::map<int, int> values = {
      {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxBlockDimX, 1024}, {cudaDevAttrMaxBlockDimY, 1024},
      {cudaDevAttrMaxBlockDimZ, 64}, {cudaDevAttrMaxGridDimX, 2147483647}, {cudaDevAttrMaxGridDimY, 65535},
      {cudaDevAttrMaxGridDimZ, 65535}, {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
      {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448}, {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
      {cudaDevAttrWarpSize, 32}, {cudaDevAttrMaxRegistersPerBlock, 65536}, {cudaDevAttrMultiProcessorCount, 132},
      {cudaDevAttrMaxRegistersPerMultiprocessor, 65536}, {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
      {cudaDevAttrMaxBlocksPerMultiprocessor, 32}, {cudaDevAttrComputeCapabilityMajor, capability() / 10},
      {cudaDevAttrComputeCapabilityMinor, capability() % 10},
      {cudaDevAttrL2CacheSize, 52428800}, {cudaDevAttrUnifiedAddressing, 1}, {cudaDevAttrClockRate, 1980000},
      {cudaDevAttrMemoryClockRate, 2619000}, {cudaDevAttrGlobalMemoryBusWidth, 5120},
      {cudaDevAttrConcurrentKernels, 1}, {cudaDevAttrAsyncEngineCount, 3}, {cudaDevAttrMemoryPoolsSupported, 1},
      {cudaDevAttrCanMapHostMemory, 1}, {cudaDevAttrTextureAlignment, 512}, {cudaDevAttrMaxPitch, 2147483647},
      {cudaDevAttrCooperativeLaunch, 1}, {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1}};
  auto found = values.find(a);
  *value = found == values.end() ? 0 : found->second;
  return cudaSuccess;
}
DR(cuDeviceGetAttribute, int* value, CUdevice_attribute a, CUdevice) {
  return (CUresult)cudaDeviceGetAttribute(value, (cudaDeviceAttr)a, 0);
}
RT(cudaGetDeviceProperties, cudaDeviceProp* p, int d) {
  *p = {};
  strcpy(p->name, "NVIDIA H100 80GB HBM3");
  p->totalGlobalMem = TOTAL, p->major = capability() / 10, p->minor = capability() % 10, p->multiProcessorCount = 132, p->l2CacheSize = 52428800;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536, p->warpSize = 32, p->memoryBusWidth = 5120;
  p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->sharedMemPerMultiprocessor = 233472;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32, p->textureAlignment = 512;
  p->memPitch = p->totalConstMem = 65536, p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = 1;
  p->cooperativeLaunch = p->memoryPoolsSupported = p->streamPrioritiesSupported = 1, p->asyncEngineCount = 3;
  p->pciBusID = 10 + d, p->uuid.bytes[0] = d;
  return cudaSuccess;
}
RT(cudaDriverGetVersion, int* v) { *v = driver(); return cudaSuccess; }
RT(cudaRuntimeGetVersion, int* v) { *v = 13000; return cudaSuccess; }
RT(cudaDeviceCanAccessPeer, int* v, int, int) { *v = 1; return cudaSuccess; }
RT(cudaDeviceGetDefaultMemPool, cudaMemPool_t* p, int) { *p = (cudaMemPool_t)64; return cudaSuccess; }
RT(cudaDeviceGetPCIBusId, char* s, int n, int d) { snprintf(s, n, "00000000:%02x:00.0", 10 + d); return cudaSuccess; }
RT(cudaDeviceGetStreamPriorityRange, int* least, int* most) { *least = 0; *most = -5; return cudaSuccess; }
RT(cudaGetLastError) { auto error = last_error; last_error = cudaSuccess; return error; }
RT(cudaPeekAtLastError) { return last_error; }
extern "C" const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorDevicesUnavailable ? "CUDA-capable device(s) is/are busy or unavailable"
         : error == cudaErrorMemoryAllocation ? "out of memory" : "an error of the CUDA that is not there";
}
extern "C" const char* cudaGetErrorName(cudaError_t) { return "cudaError"; }
DR(cuGetErrorString, CUresult error, const char** s) { *s = cudaGetErrorString((cudaError_t)error); return CUDA_SUCCESS; }
DR(cuDriverGetVersion, int* v) { *v = driver(); return CUDA_SUCCESS; }
DR(cuDeviceGet, CUdevice* d, int n) { *d = n; return CUDA_SUCCESS; }
DR(cuDeviceGetCount, int* n) { *n = num_devices(); return CUDA_SUCCESS; }
static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(1000 + device); }
DR(cuCtxGetCurrent, CUcontext* c) {
  *c = state().context[current] ? context_of(current) : nullptr;
  return CUDA_SUCCESS;
}
DR(cuCtxSetCurrent, CUcontext c) {
  if (c) { current = (uintptr_t)c - 1000; touch(); }
  return CUDA_SUCCESS;
}
DR(cuCtxGetDevice, CUdevice* d) { *d = current; return CUDA_SUCCESS; }
DR(cuDevicePrimaryCtxRetain, CUcontext* c, CUdevice d) { *c = context_of(d); return CUDA_SUCCESS; }
DR(cuDevicePrimaryCtxGetState, CUdevice d, unsigned* flags, int* active) {
  *flags = 0, *active = state().context[d];
  return CUDA_SUCCESS;
}

// Streams, events and graphs: everything is done when the call returns, or after FAKE_US microseconds a kernel
RT(cudaDeviceSynchronize) { touch(); wait("cudaDeviceSynchronize", all_done()); return cudaSuccess; }
RT(cudaEventCreateWithFlags, cudaEvent_t* e, unsigned) {
  touch();
  *e = (cudaEvent_t) new Event{current};
  return cudaSuccess;
}
RT(cudaEventCreate, cudaEvent_t* e) { return cudaEventCreateWithFlags(e, 0); }
RT(cudaEventDestroy, cudaEvent_t e) { delete (Event*)e; return cudaSuccess; }
RT(cudaEventRecordWithFlags, cudaEvent_t e, cudaStream_t s, unsigned) {
  if (((Event*)e)->device != (real(s) ? real(s)->device : current)) forbid("event of another device than its stream's");
  ((Event*)e)->done = std::max(stream_of(s).done, kernel_seconds() ? now() : 0);
  return cudaSuccess;
}
RT(cudaEventRecord, cudaEvent_t e, cudaStream_t s) { return cudaEventRecordWithFlags(e, s, 0); }
RT(cudaEventQuery, cudaEvent_t e) {
  forbid_in_capture("cudaEventQuery");
  return kernel_seconds() && ((Event*)e)->done > now() ? cudaErrorNotReady : cudaSuccess;
}
RT(cudaEventSynchronize, cudaEvent_t e) { wait("cudaEventSynchronize", ((Event*)e)->done); return cudaSuccess; }
RT(cudaEventElapsedTime, float* ms, cudaEvent_t start, cudaEvent_t end) {
  *ms = kernel_seconds() ? (((Event*)end)->done - ((Event*)start)->done) * 1e3 : 1;
  return cudaSuccess;
}
RT(cudaStreamWaitEvent, cudaStream_t s, cudaEvent_t e, unsigned) {
  stream_of(s).done = std::max(stream_of(s).done, ((Event*)e)->done);
  return cudaSuccess;
}
RT(cudaStreamCreateWithPriority, cudaStream_t* s, unsigned, int) {
  touch();
  *s = (cudaStream_t) new Stream{current, false};
  return cudaSuccess;
}
RT(cudaStreamCreateWithFlags, cudaStream_t* s, unsigned) { return cudaStreamCreateWithPriority(s, 0, 0); }
RT(cudaStreamGetPriority, cudaStream_t, int* p) { *p = 0; return cudaSuccess; }
RT(cudaStreamSynchronize, cudaStream_t s) { wait("cudaStreamSynchronize", stream_of(s).done); return cudaSuccess; }
RT(cudaLaunchHostFunc, cudaStream_t, cudaHostFn_t f, void* data) { f(data); return cudaSuccess; }
RT(cudaStreamBeginCapture, cudaStream_t s, cudaStreamCaptureMode) {
  real(s)->capturing = true, captures++;
  return cudaSuccess;
}
RT(cudaStreamEndCapture, cudaStream_t s, cudaGraph_t* g) {
  real(s)->capturing = false, captures--;
  *g = (cudaGraph_t) new int;
  return cudaSuccess;
}
RT(cudaStreamIsCapturing, cudaStream_t s, cudaStreamCaptureStatus* status) {
  *status = real(s) && real(s)->capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
RT(cudaStreamGetCaptureInfo, cudaStream_t s, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* g,
   const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* n) {
  cudaStreamIsCapturing(s, status);
  if (id) *id = *status == cudaStreamCaptureStatusActive ? 7 : 0;
  if (g) *g = nullptr;
  if (nodes) *nodes = nullptr;
  if (edges) *edges = nullptr;
  if (n) *n = 0;
  return cudaSuccess;
}
RT(cudaGraphInstantiateWithFlags, cudaGraphExec_t* e, cudaGraph_t, unsigned long long) {
  *e = (cudaGraphExec_t) new int;
  return cudaSuccess;
}
RT(cudaGraphInstantiate, cudaGraphExec_t* e, cudaGraph_t, unsigned long long) {
  return cudaGraphInstantiateWithFlags(e, nullptr, 0);
}
RT(cudaGraphLaunch, cudaGraphExec_t, cudaStream_t s) { queue(s, 1); count("graph launches"); return cudaSuccess; }
RT(cudaGraphGetNodes, cudaGraph_t, cudaGraphNode_t*, size_t* n) { *n = 1; return cudaSuccess; }

// Memory
RT(cudaMalloc, void** p, size_t n) { return allocate(p, n, DEVICE, "cudaMalloc"); }
RT(cudaMallocAsync, void** p, size_t n, cudaStream_t) { return cudaMalloc(p, n); }
RT(cudaHostAlloc, void** p, size_t n, unsigned) { return allocate(p, n, PINNED, "cudaHostAlloc"); }
RT(cudaMallocHost, void** p, size_t n) { return cudaHostAlloc(p, n, 0); }
RT(cudaFree, void* p) { return release(p, "cudaFree"); }
RT(cudaFreeAsync, void* p, cudaStream_t) { return cudaFree(p); }
RT(cudaFreeHost, void* p) { return release(p, "cudaFreeHost"); }
RT(cudaHostRegister, void* p, size_t n, unsigned) {
  Lock lock(state().mutex);
  state().blocks[(uintptr_t)p] = {n, current, PINNED};
  return cudaSuccess;
}
RT(cudaHostUnregister, void* p) { Lock lock(state().mutex); state().blocks.erase((uintptr_t)p); return cudaSuccess; }
RT(cudaMemGetInfo, size_t* free, size_t* total) {
  touch();
  *total = TOTAL, *free = TOTAL - used_by_others() - state().used[current];
  return cudaSuccess;
}
RT(cudaMemcpy, void* to, const void* from, size_t n, cudaMemcpyKind) { return copy(to, from, n, 0, false); }
RT(cudaMemcpyAsync, void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t s) {
  return copy(to, from, n, s, true);
}
RT(cudaMemcpyPeerAsync, void* to, int, const void* from, int, size_t n, cudaStream_t s) {
  return copy(to, from, n, s, true);
}
RT(cudaMemcpy2DAsync, void* to, size_t step, const void* from, size_t from_step, size_t width, size_t height,
   cudaMemcpyKind, cudaStream_t) {
  for (size_t i = 0; i < height; i++) memcpy((char*)to + i * step, (const char*)from + i * from_step, width);
  return cudaSuccess;
}
RT(cudaMemset, void* p, int value, size_t n) { memset(p, value, n); return cudaSuccess; }
RT(cudaMemsetAsync, void* p, int value, size_t n, cudaStream_t) { return cudaMemset(p, value, n); }
RT(cudaGetSymbolAddress, void** p, const void*) { static char room[1 << 20]; *p = room; return cudaSuccess; }
RT(cudaPointerGetAttributes, cudaPointerAttributes* a, const void* p) {
  Lock lock(state().mutex);
  auto block = find(p);
  *a = {};
  if (!block) { a->device = -2; return cudaSuccess; }
  a->type = block->kind == PINNED ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  a->device = block->device, a->devicePointer = (void*)p, a->hostPointer = block->kind == PINNED ? (void*)p : nullptr;
  return cudaSuccess;
}
DR(cuPointerGetAttribute, void* out, CUpointer_attribute a, CUdeviceptr p) {
  if (a == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr*)out = p; else *(int*)out = 0;
  Lock lock(state().mutex);
  return find((void*)p) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
RT(cudaGetDriverEntryPointByVersion, const char* name, void** f, unsigned, unsigned long long,
   cudaDriverEntryPointQueryResult* result) {
  Dl_info own;
  dladdr((void*)fake_reset, &own);
  static void* library = dlopen(own.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  *f = dlsym(library, name);
  if (!*f) *f = dlsym(library, (std::string(name) + "_v2").c_str());
  if (result) *result = *f ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *f ? cudaSuccess : cudaErrorSymbolNotFound;
}

// cuBLAS
#define GEMM(name) extern "C" int name() { queue(0, 1); count("LAUNCH " #name); count("launches"); return 0; }
GEMM(cublasGemmEx) GEMM(cublasGemmStridedBatchedEx) GEMM(cublasSgemm_v2) GEMM(cublasSgemmStridedBatched)
GEMM(cublasSgemv_v2) GEMM(cublasSgemmEx) GEMM(cublasLtMatmul)
static int make(void** p) { *p = calloc(1, 512); return 0; }
extern "C" int cublasCreate_v2(void** p) { return make(p); }
extern "C" int cublasLtMatmulDescCreate(void** p, int, int) { return make(p); }
extern "C" int cublasLtMatrixLayoutCreate(void** p, int, uint64_t, uint64_t, int64_t) { return make(p); }
extern "C" int cublasLtMatmulPreferenceCreate(void** p) { return make(p); }
extern "C" int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return 0; }
extern "C" int cublasGetMathMode(void*, int* mode) { *mode = 0; return 0; }
extern "C" size_t cublasLtGetVersion() { return 130100; }
extern "C" int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, void* found,
                                              int* n) {
  memset(found, 0, 64);
  *n = 1;
  return 0;
}

// NCCL: through files, which every rank reads; a rank removes what all have read two calls ago
struct Id { char path[128]; };
struct Comm { std::string path; int size, rank; long calls = 0; };
static std::string file_of(Comm* c, int rank, long call) {
  return c->path + "-" + std::to_string(call) + "-" + std::to_string(rank);
}
static int exchange(Comm* c, const char* name, std::string own, std::vector<std::string>* all) {
  touch();
  forbid_in_capture(name);
  count(std::string("NCCL ") + name);
  std::string path = file_of(c, c->rank, c->calls), part = path + ".part";
  FILE* file = fopen(part.c_str(), "wb");
  fwrite(own.data(), 1, own.size(), file);
  fclose(file);
  rename(part.c_str(), path.c_str());
  for (int rank = 0; rank < c->size; rank++) {
    while (!(file = fopen(file_of(c, rank, c->calls).c_str(), "rb"))) usleep(200);
    std::string theirs;
    char piece[65536];
    while (size_t n = fread(piece, 1, sizeof piece, file)) theirs.append(piece, n);
    fclose(file);
    all->push_back(theirs);
  }
  remove(file_of(c, c->rank, c->calls++ - 2).c_str());
  return 0;
}
static size_t item_size(int type) { return std::vector<size_t>{1, 1, 4, 4, 8, 8, 2, 4, 8, 2}[type]; }
extern "C" int ncclGetUniqueId(Id* id) {
  static int number = 0;
  snprintf(id->path, sizeof id->path, "%s/%d-%d", getenv("FAKE_NCCL"), getpid(), number++);
  return 0;
}
extern "C" int ncclGetVersion(int* v) { *v = 22809; return 0; }
extern "C" int ncclCommInitRankConfig(Comm** c, int n, Id id, int rank, void*) {
  *c = new Comm{id.path, n, rank};
  return 0;
}
extern "C" int ncclCommInitRank(Comm** c, int n, Id id, int rank) { return ncclCommInitRankConfig(c, n, id, rank, 0); }
extern "C" int ncclCommCount(Comm* c, int* n) { *n = c->size; return 0; }
extern "C" int ncclCommUserRank(Comm* c, int* rank) { *rank = c->rank; return 0; }
extern "C" int ncclCommGetAsyncError(void*, int* error) { *error = 0; return 0; }
extern "C" const char* ncclGetErrorString(int) { return "an error of the NCCL that is not there"; }
extern "C" const char* ncclGetLastError(void*) { return ""; }
extern "C" int ncclAllGather(const char* from, char* to, size_t n, int type, Comm* c, cudaStream_t) {
  std::vector<std::string> all;
  exchange(c, "all-gather", std::string(from, n * item_size(type)), &all);
  n *= item_size(type);
  for (int rank = 0; rank < c->size; rank++) memcpy(to + rank * n, all[rank].data(), n);
  return 0;
}
extern "C" int ncclBroadcast(const char* from, char* to, size_t n, int type, int root, Comm* c, cudaStream_t) {
  std::vector<std::string> all;
  exchange(c, "broadcast", c->rank == root ? std::string(from, n * item_size(type)) : "", &all);
  memcpy(to, all[root].data(), all[root].size());
  return 0;
}
extern "C" int ncclBcast(char* data, size_t n, int type, int root, Comm* c, cudaStream_t s) {
  return ncclBroadcast(data, data, n, type, root, c, s);
}
template <class T> static void fold(std::string& sum, const std::string& other, int op) {
  T *a = (T*)sum.data(), *b = (T*)other.data();
  for (size_t i = 0; i < sum.size() / sizeof(T); i++)
    a[i] = op == 2 ? (a[i] > b[i] ? a[i] : b[i]) : op == 3 ? (a[i] < b[i] ? a[i] : b[i]) : a[i] + b[i];
}
extern "C" int ncclAllReduce(const char* from, char* to, size_t n, int type, int op, Comm* c, cudaStream_t) {
  std::vector<std::string> all;
  exchange(c, "all-reduce", std::string(from, n * item_size(type)), &all);
  for (int rank = 1; rank < c->size; rank++) {
    if (type == 7) fold<float>(all[0], all[rank], op);
    else if (type == 4 || type == 5) fold<long>(all[0], all[rank], op);
    else if (type == 2 || type == 3) fold<int>(all[0], all[rank], op);
    else if (type < 2) fold<unsigned char>(all[0], all[rank], op);
  }
  memcpy(to, all[0].data(), all[0].size());
  return 0;
}
