// A GPU's workgroup on one thread of this machine: its threads take turns, each until it has to wait for others.
//
// After every barrier they go on in another order, so that results which depend on the order differ between runs of a
// test's several kernels: what a barrier is missing for shows. Buffers end at a page that nobody may touch.

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

constexpr size_t STACK = 256 << 10;  // bytes; pages that are not touched take no memory
constexpr size_t PAGE = 4096, ALIGNMENT = 256;
constexpr int WAVE = 32;             // threads that a matrix unit takes together

enum class Wait { NOTHING, WAVE, GROUP, END };

struct Thread {
  void* stack_pointer;
  Wait wait;
};

struct Wave {  // the registers that its threads hand to a matrix unit, and the matrices that these are
  int a[WAVE][4], b[WAVE][4];
  int left[16][WAVE], right[16][WAVE];  // both with a row per row or column of the result
  bool gathered;
};

static std::vector<char*> stacks;
static std::vector<Thread> threads;
static std::vector<Wave> waves;
static int group_index, thread_index;
static void* scheduler;
static void (*kernel)(void**);
static void** kernel_arguments;

extern "C" void emulated_switch(void** kept, void* next);
asm(R"(
.text
.type emulated_switch, @function
emulated_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

static void stop(Wait wait) {
  Thread& own = threads[thread_index];
  own.wait = wait;
  emulated_switch(&own.stack_pointer, scheduler);
}

static void thread_main() {
  kernel(kernel_arguments);
  stop(Wait::END);
}

static void start(int index) {
  if (index == int(stacks.size())) {
    void* stack = mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) abort();
    mprotect(stack, PAGE, PROT_NONE);
    stacks.push_back((char*)stack);
  }
  void** top = (void**)(stacks[index] + STACK - index % 61 * 128);  // or all stacks meet in the same lines of the cache
  *--top = nullptr;  // no caller
  *--top = (void*)thread_main;
  for (int i = 0; i < 6; ++i) *--top = nullptr;  // registers
  threads[index] = {top, Wait::NOTHING};
}

static bool all_wait(int first, int last, Wait wait) {
  for (int i = first; i < last; ++i)
    if (threads[i].wait != wait) return false;
  return true;
}

static void run_group(int count, std::minstd_rand& random) {
  threads.resize(count);
  waves.resize((count + WAVE - 1) / WAVE);
  std::vector<int> order(count);
  for (int i = 0; i < count; ++i) start(order[i] = i);
  for (;;) {
    std::shuffle(order.begin(), order.end(), random);
    bool moved = true;
    while (moved) {
      moved = false;
      for (int index : order) {
        if (threads[index].wait != Wait::NOTHING) continue;
        moved = true;
        thread_index = index;
        emulated_switch(&scheduler, threads[index].stack_pointer);
        int first = index / WAVE * WAVE, last = first + WAVE;
        if (threads[index].wait != Wait::WAVE || last > count || !all_wait(first, last, Wait::WAVE)) continue;
        waves[index / WAVE].gathered = false;
        for (int i = first; i < last; ++i) threads[i].wait = Wait::NOTHING;
      }
    }
    bool ended = true;
    for (Thread& thread : threads) {
      if (thread.wait == Wait::WAVE) {
        fprintf(stderr, "emulated GPU: threads of a wave wait for others that do not come\n");
        abort();
      }
      if (thread.wait != Wait::GROUP) continue;
      thread.wait = Wait::NOTHING;
      ended = false;
    }
    if (ended) return;
  }
}

static size_t up(size_t bytes, size_t multiple) { return (bytes + multiple - 1) / multiple * multiple; }

// Memory of some bytes, followed by none.
extern "C" void* allocate_guarded(size_t bytes) {
  size_t pages = up(bytes, PAGE);
  char* memory = (char*)mmap(nullptr, pages + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) abort();
  mprotect(memory + pages, PAGE, PROT_NONE);
  return memory + pages - up(bytes, ALIGNMENT);
}

extern "C" void free_guarded(void* memory, size_t bytes) {
  size_t pages = up(bytes, PAGE);
  munmap((char*)memory + up(bytes, ALIGNMENT) - pages, pages + PAGE);
}

static sigjmp_buf before_fault;

static void leave(int) { siglongjmp(before_fault, 1); }

// Whether all went well: false where a thread touched memory that is not there.
extern "C" bool run(void (*call)(void**), void** arguments, int groups, int count) {
  static std::minstd_rand random;
  kernel = call;
  kernel_arguments = arguments;
  struct sigaction own = {}, others;
  own.sa_handler = leave;
  sigaction(SIGSEGV, &own, &others);
  bool well = !sigsetjmp(before_fault, 1);
  if (well)
    for (group_index = 0; group_index < groups; ++group_index) run_group(count, random);
  sigaction(SIGSEGV, &others, nullptr);
  return well;
}

extern "C" int emulated_group() { return group_index; }
extern "C" int emulated_thread() { return thread_index; }
extern "C" void emulated_barrier() { stop(Wait::GROUP); }
extern "C" void emulated_wave_barrier() { stop(Wait::WAVE); }
extern "C" int emulated_dot4(bool, int a, bool, int b, int c, bool) {
  for (int i = 0; i < 4; ++i) c += int((signed char)(a >> 8 * i)) * int((signed char)(b >> 8 * i));
  return c;
}

// Matrix units ---------------------------------------------------------------------------------------------------------

typedef void Read(int lane, int byte, int& row, int& k);

static void gather(int (&matrix)[16][WAVE], int (&registers)[WAVE][4], int bytes, Read read) {
  for (int lane = 0; lane < WAVE; ++lane)
    for (int byte = 0; byte < bytes; ++byte) {
      int row, k;
      read(lane, byte, row, k);
      matrix[row][k] = (signed char)(registers[lane][byte / 4] >> 8 * (byte % 4));
    }
}

static void multiply(int* d, const int* a, const int* b, int bytes_a, int bytes_b, int k, Read read_a, Read read_b,
                     int results, void place(int lane, int i, int& row, int& column)) {
  int lane = thread_index % WAVE;
  Wave& wave = waves[thread_index / WAVE];
  memcpy(wave.a[lane], a, bytes_a);
  memcpy(wave.b[lane], b, bytes_b);
  emulated_wave_barrier();
  if (!wave.gathered) {
    gather(wave.left, wave.a, bytes_a, read_a);
    gather(wave.right, wave.b, bytes_b, read_b);
    wave.gathered = true;
  }
  for (int i = 0; i < results; ++i) {
    int row, column;
    place(lane, i, row, column);
    for (int j = 0; j < k; ++j) d[i] += wave.left[row][j] * wave.right[column][j];
  }
}

// PTX ISA, matrix fragments for mma.m16n8k16 and m16n8k32 with .s8
extern "C" void emulated_mma(int* d, const int* a, const int* b, int k) {
  multiply(d, a, b, k / 2, k / 4, k,
           [](int lane, int i, int& row, int& k) {
             row = i < 4 || (8 <= i && i < 12) ? lane / 4 : lane / 4 + 8;
             k = lane % 4 * 4 + (i & 3) + (i < 8 ? 0 : 16);
           },
           [](int lane, int i, int& row, int& k) {
             row = lane / 4;
             k = lane % 4 * 4 + (i & 3) + (i < 4 ? 0 : 16);
           },
           4,
           [](int lane, int i, int& row, int& column) {
             row = i < 2 ? lane / 4 : lane / 4 + 8;
             column = lane % 4 * 2 + (i & 1);
           });
}

// RDNA 3 ISA 7.9: both halves of the wave hold all of K
static void read_rdna3(int lane, int i, int& row, int& k) {
  row = lane % 16;
  k = i;
}

extern "C" void emulated_wmma_4(int* d, const int* a, const int* b) {
  multiply(d, a, b, 16, 16, 16, read_rdna3, read_rdna3, 8, [](int lane, int i, int& row, int& column) {
    row = 2 * i + lane / 16;
    column = lane % 16;
  });
  int lane = thread_index % WAVE, other = lane ^ 16;
  Wave& wave = waves[thread_index / WAVE];
  bool alike = !memcmp(wave.a[lane], wave.a[other], 16) && !memcmp(wave.b[lane], wave.b[other], 16);
  if (!alike)
    for (int i = 0; i < 8; ++i) d[i] = -1;  // NaN, once it is taken for a float: the result is not defined
  emulated_wave_barrier();  // nobody hands in the next registers before all have compared these
}

// RDNA 4 ISA 7.12: each half of the wave holds half of K
static void read_rdna4(int lane, int i, int& row, int& k) {
  row = lane % 16;
  k = lane / 16 * 8 + i;
}

extern "C" void emulated_wmma_2(int* d, const int* a, const int* b) {
  multiply(d, a, b, 8, 8, 16, read_rdna4, read_rdna4, 8, [](int lane, int i, int& row, int& column) {
    row = lane / 16 * 8 + i;
    column = lane % 16;
  });
}
