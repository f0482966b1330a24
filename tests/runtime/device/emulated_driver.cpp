// libcuda.so.1 and libamdhip64.so.7 of a machine with one GPU, which runs kernels that were compiled for this processor:
// KERNEL.so beside this file, with `call` and `parameter_bytes`; and emulated_gpu.so, which calls them.
//
// Strict where drivers are not: memory is filled with NaN, whatever is touched behind it is an error, and a kernel's buffers
// have to lie in memory that is live.

#include <dlfcn.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

enum Result { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_FOUND = 500, ILLEGAL_ADDRESS = 700 };

constexpr size_t MEMORY = size_t(1) << 30;  // bytes
constexpr int SHARED = 48 << 10, THREADS = 1024;

struct Function {
  std::string name;
  void (*call)(void**);
  const int* sizes;  // bytes of each parameter, then 0
};

typedef std::vector<std::function<int()>> Graph;
typedef std::chrono::steady_clock::time_point Event;

std::map<char*, size_t> live;  // allocations
std::map<std::string, Function> functions;
size_t used;
Graph* capture;  // of the only stream that may exist

std::string folder() {
  Dl_info info;
  dladdr((void*)folder, &info);
  std::string path = info.dli_fname;
  return path.substr(0, path.rfind('/') + 1);
}

int queue(std::function<int()> work) {
  if (!capture) return work();
  capture->push_back(std::move(work));
  return SUCCESS;
}

template <class F> F* gpu(const char* name) {
  static void* library = dlopen((folder() + "emulated_gpu.so").c_str(), RTLD_NOW | RTLD_GLOBAL);
  return (F*)dlsym(library, name);
}

int allocate(void** address, size_t bytes) {
  if (bytes == 0 || capture) return INVALID_VALUE;
  if (bytes > MEMORY - used) return OUT_OF_MEMORY;
  char* memory = (char*)gpu<void*(size_t)>("allocate_guarded")(bytes);
  memset(memory, 0xFF, bytes);
  live[memory] = bytes;
  used += bytes;
  *address = memory;
  return SUCCESS;
}

int release(void* address) {
  auto found = live.find((char*)address);
  if (found == live.end() || capture) return INVALID_VALUE;
  gpu<void(void*, size_t)>("free_guarded")(address, found->second);
  used -= found->second;
  live.erase(found);
  return SUCCESS;
}

bool is_live(void* address, size_t bytes) {
  auto after = live.upper_bound((char*)address);
  if (after == live.begin()) return false;
  --after;
  return (char*)address + bytes <= after->first + after->second;
}

int fill(void* address, int value, size_t bytes) {
  return queue([=] { return is_live(address, bytes) ? (memset(address, value, bytes), SUCCESS) : ILLEGAL_ADDRESS; });
}

int copy(void* target, void* source, size_t bytes) {
  return queue([=] {
    if (!is_live(target, bytes) || !is_live(source, bytes)) return ILLEGAL_ADDRESS;
    memcpy(target, source, bytes);
    return SUCCESS;
  });
}

int find(void** function, const char* name) {
  auto known = functions.find(name);
  if (known == functions.end()) {
    void* library = dlopen((folder() + name + ".so").c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      fprintf(stderr, "emulated driver: %s\n", dlerror());
      return NOT_FOUND;
    }
    known = functions.insert({name, {name, (void (*)(void**))dlsym(library, "call"),
                                     (const int*)dlsym(library, "parameter_bytes")}}).first;
  }
  *function = &known->second;
  return SUCCESS;
}

int launch(void* handle, unsigned groups, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
           unsigned shared, void** parameters) {
  if (groups == 0 || y != 1 || z != 1 || ty != 1 || tz != 1 || threads > THREADS || shared) return INVALID_VALUE;
  Function function = *(Function*)handle;
  auto values = std::make_shared<std::vector<uint64_t>>();
  for (int i = 0; function.sizes[i]; ++i) {
    values->push_back(0);
    memcpy(&values->back(), parameters[i], function.sizes[i]);
    if (function.sizes[i] == 8 && !is_live((void*)values->back(), 1)) return ILLEGAL_ADDRESS;
  }
  return queue([=] {
    std::vector<void*> addresses;
    for (uint64_t& value : *values) addresses.push_back(&value);
    if (gpu<bool(void (*)(void**), void**, int, int)>("run")(function.call, addresses.data(), groups, threads))
      return SUCCESS;
    fprintf(stderr, "emulated driver: %s touched memory that is not there\n", function.name.c_str());
    return ILLEGAL_ADDRESS;
  });
}

int begin_capture() {
  if (capture) return INVALID_VALUE;
  capture = new Graph;
  return SUCCESS;
}

int end_capture(void** graph) {
  *graph = capture;
  capture = nullptr;
  return *graph ? SUCCESS : INVALID_VALUE;
}

int launch_graph(void* graph) {
  for (auto& work : *(Graph*)graph)
    if (int result = work()) return result;
  return SUCCESS;
}

float milliseconds(void* first, void* last) {
  return std::chrono::duration<float, std::milli>(*(Event*)last - *(Event*)first).count();
}

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int
#define DONE(work) ((work), SUCCESS)

// CUDA driver API ------------------------------------------------------------------------------------------------------

API cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }
API cuDriverGetVersion(int* version) { return DONE(*version = 13000); }
API cuDeviceGetCount(int* count) { return DONE(*count = 1); }
API cuDeviceGet(int* device, int number) { return number ? INVALID_VALUE : DONE(*device = 0); }
API cuDeviceGetName(char* name, int length, int) { return DONE(strncpy(name, "Emulated GPU", length)); }
API cuDeviceTotalMem(size_t* bytes, int) { return DONE(*bytes = MEMORY); }
API cuDeviceGetAttribute(int* value, int attribute, int) {
  const std::map<int, int> values = {{1, THREADS}, {2, THREADS}, {3, THREADS}, {4, 64}, {5, 0x7FFFFFFF}, {8, SHARED},
                                     {18, 0}, {75, 8}, {76, 9}};
  return values.count(attribute) ? DONE(*value = values.at(attribute)) : INVALID_VALUE;
}
API cuDevicePrimaryCtxRetain(void** context, int) { return DONE(*context = &live); }
API cuDevicePrimaryCtxRelease(int) { return SUCCESS; }
API cuCtxSetCurrent(void* context) { return context == &live ? SUCCESS : INVALID_VALUE; }
API cuMemGetInfo(size_t* free, size_t* total) { return DONE((*free = MEMORY - used, *total = MEMORY)); }
API cuMemAlloc(void** address, size_t bytes) { return allocate(address, bytes); }
API cuMemFree(void* address) { return release(address); }
API cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
  return flags == 2 ? allocate(address, bytes) : INVALID_VALUE;
}
API cuMemHostGetDevicePointer(void** address, void* host, unsigned) { return DONE(*address = host); }
API cuMemFreeHost(void* address) { return release(address); }
API cuMemsetD8Async(void* address, unsigned char value, size_t bytes, void*) { return fill(address, value, bytes); }
API cuMemcpyAsync(void* target, void* source, size_t bytes, void*) { return copy(target, source, bytes); }
API cuStreamCreate(void** stream, unsigned) { return DONE(*stream = &used); }
API cuStreamDestroy(void*) { return SUCCESS; }
API cuStreamQuery(void*) { return SUCCESS; }
API cuModuleLoadData(void** module, const char* code) {
  return memcmp(code, "\177ELF", 4) ? INVALID_VALUE : DONE(*module = &functions);
}
API cuModuleUnload(void*) { return SUCCESS; }
API cuModuleGetFunction(void** function, void*, const char* name) { return find(function, name); }
API cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz,
                   unsigned shared, void*, void** parameters, void** extra) {
  return extra ? INVALID_VALUE : launch(function, x, y, z, tx, ty, tz, shared, parameters);
}
API cuStreamBeginCapture(void*, int) { return begin_capture(); }
API cuStreamEndCapture(void*, void** graph) { return end_capture(graph); }
API cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
  return DONE(*executable = new Graph(*(Graph*)graph));
}
API cuGraphDestroy(void* graph) { return DONE(delete (Graph*)graph); }
API cuGraphLaunch(void* executable, void*) { return launch_graph(executable); }
API cuGraphExecDestroy(void* executable) { return DONE(delete (Graph*)executable); }
API cuEventCreate(void** event, unsigned) { return DONE(*event = new Event); }
API cuEventDestroy(void* event) { return DONE(delete (Event*)event); }
API cuEventRecord(void* event, void*) { return DONE(*(Event*)event = std::chrono::steady_clock::now()); }
API cuEventElapsedTime(float* result, void* first, void* last) { return DONE(*result = milliseconds(first, last)); }
API cuGetErrorName(int, const char** name) { return DONE(*name = "CUDA_ERROR_EMULATED"); }
API cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
  static void* own = dlopen((folder() + "libcuda.so.1").c_str(), RTLD_NOW);
  *function = dlsym(own, strcmp(name, "cuGetProcAddress") ? name : "cuGetProcAddress_v2");
  if (status) *status = *function ? 0 : 1;
  return *function ? SUCCESS : NOT_FOUND;
}

// HIP ------------------------------------------------------------------------------------------------------------------

// What differs in nothing but its name.
#define SAME(hip, cuda) extern "C" __attribute__((visibility("default"), alias(#cuda))) decltype(cuda) hip

SAME(hipInit, cuInit);
SAME(hipGetDeviceCount, cuDeviceGetCount);
SAME(hipDeviceGetName, cuDeviceGetName);
SAME(hipDeviceTotalMem, cuDeviceTotalMem);
SAME(hipMemGetInfo, cuMemGetInfo);
SAME(hipMalloc, cuMemAlloc);
SAME(hipFree, cuMemFree);
SAME(hipHostMalloc, cuMemHostAlloc);
SAME(hipHostGetDevicePointer, cuMemHostGetDevicePointer);
SAME(hipHostFree, cuMemFreeHost);
SAME(hipMemsetD8Async, cuMemsetD8Async);
SAME(hipStreamCreateWithFlags, cuStreamCreate);
SAME(hipStreamDestroy, cuStreamDestroy);
SAME(hipStreamQuery, cuStreamQuery);
SAME(hipModuleLoadData, cuModuleLoadData);
SAME(hipModuleUnload, cuModuleUnload);
SAME(hipModuleGetFunction, cuModuleGetFunction);
SAME(hipModuleLaunchKernel, cuLaunchKernel);
SAME(hipStreamBeginCapture, cuStreamBeginCapture);
SAME(hipStreamEndCapture, cuStreamEndCapture);
SAME(hipGraphDestroy, cuGraphDestroy);
SAME(hipGraphLaunch, cuGraphLaunch);
SAME(hipGraphExecDestroy, cuGraphExecDestroy);
SAME(hipEventDestroy, cuEventDestroy);
SAME(hipEventRecord, cuEventRecord);
SAME(hipEventElapsedTime, cuEventElapsedTime);

API hipRuntimeGetVersion(int* version) { return DONE(*version = 70200000); }
API hipSetDevice(int number) { return number ? INVALID_VALUE : SUCCESS; }
API hipDeviceGetAttribute(int* value, int, int) { return DONE(*value = 1); }
API hipGetDevicePropertiesR0600(char* properties, int) { return DONE(strcpy(properties + 1160, "gfx1151")); }
API hipMemcpyAsync(void* target, void* source, size_t bytes, int kind, void*) {
  return kind == 4 ? copy(target, source, bytes) : INVALID_VALUE;
}
API hipGraphInstantiate(void** executable, void* graph, void*, char*, size_t) {
  return cuGraphInstantiateWithFlags(executable, graph, 0);
}
API hipEventCreate(void** event) { return cuEventCreate(event, 0); }
extern "C" const char* hipGetErrorName(int) { return "hipErrorEmulated"; }
