// A group of threads on one CPU thread: each is a fiber, and a barrier is a switch to the next.
//
// It makes mistakes visible that a GPU may hide. Shared memory and outputs start as NaN; every index is checked; two
// threads that touch one shared element without a barrier between them, one of them to write, are a race; and so is a
// barrier that some threads reach and others do not. The order of threads between two barriers is the caller's.

#pragma once

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace emulator {

constexpr size_t STACK = 64 * 1024;

struct Resettable {
  virtual void reset() = 0;
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(STACK);
  bool done = false;
};

// Of the group that runs now.
inline ucontext_t scheduler;
inline std::vector<Fiber> fibers;
inline std::vector<Resettable*> shared;
inline int current = 0;  // the thread that runs
inline long epoch = 0;   // barriers that all threads have passed, over all groups
inline std::string fault;

[[noreturn]] inline void fail(const std::string& what) {
  throw std::runtime_error("thread " + std::to_string(current) + ": " + what);
}

inline void check(const char* name, long index, long size) {
  if (index < 0 || index >= size) {
    fail(std::string(name) + "[" + std::to_string(index) + "] is outside its " + std::to_string(size) + " elements");
  }
}

// An input or an output.
template <typename T>
struct Buffer {
  const char* name;
  T* data;
  long size;

  T& operator[](long index) const {
    check(name, index, size);
    return data[index];
  }
};

// An array in shared memory.
template <typename T, int N>
struct Shared : Resettable {
  struct Element {
    T value;
    int writer, reader;
    long written, read;  // epochs
    bool several;        // readers in that epoch
  };

  struct Access {
    Shared& array;
    long index;

    operator T() const {
      Element& e = array.elements[index];
      if (e.written == epoch && e.writer != current) array.race(index, "read", "written", e.writer);
      e.several = e.read == epoch && (e.several || e.reader != current);
      e.reader = current;
      e.read = epoch;
      return e.value;
    }

    Access& operator=(T value) {
      Element& e = array.elements[index];
      if (e.written == epoch && e.writer != current) array.race(index, "written", "written", e.writer);
      if (e.read == epoch && (e.several || e.reader != current)) array.race(index, "written", "read", e.reader);
      e.value = value;
      e.writer = current;
      e.written = epoch;
      return *this;
    }

    Access& operator=(const Access& other) { return *this = T(other); }
    Access& operator+=(T value) { return *this = T(*this) + value; }
  };

  const char* name;
  Element elements[N];

  explicit Shared(const char* name) : name(name) {
    shared.push_back(this);
    reset();
  }

  void reset() override {
    std::memset(elements, 0xff, sizeof elements);  // NaN; epochs of -1
  }

  Access operator[](long index) {
    check(name, index, N);
    return {*this, index};
  }

  void race(long index, const char* now, const char* before, int other) {
    fail(std::string(name) + "[" + std::to_string(index) + "] is " + now + ", and was " + before + " by thread " +
         std::to_string(other) + ", with no barrier between");
  }
};

inline void barrier() { swapcontext(&fibers[current].context, &scheduler); }

// Runs `body(lane)` in every thread of a group. `order` is that of the threads between barriers.
template <typename Body>
void run_group(const Body& body, int threads, const int* order) {
  static const Body* running;
  running = &body;
  fibers.resize(threads);
  for (Resettable* array : shared) array->reset();
  ++epoch;
  for (Fiber& fiber : fibers) {
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(
        &fiber.context,
        +[] {
          try {
            (*running)(current);
          } catch (const std::exception& error) {
            if (fault.empty()) fault = error.what();
          }
          fibers[current].done = true;
        },
        0);
  }
  for (int left = threads; left > 0; ++epoch) {
    int finished = 0;
    for (int i = 0; i < threads && fault.empty(); ++i) {
      current = order[i];
      swapcontext(&scheduler, &fibers[current].context);
      finished += fibers[current].done;
    }
    if (fault.empty() && finished != 0 && finished != left) {
      fault = std::to_string(left - finished) + " threads wait at a barrier that " + std::to_string(finished) + " never reach";
    }
    if (!fault.empty()) return;
    left -= finished;
  }
}

}  // namespace emulator

#define SHARED(type, name, size) static emulator::Shared<type, size> name(#name)
#define BARRIER() emulator::barrier()
#define EXP(x) std::exp(x)
#define TANH(x) std::tanh(x)
