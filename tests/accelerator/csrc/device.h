// The test accelerator: devices that live in this process, with memory that the host cannot touch by accident and
// streams that run behind the host. This header is what its parts share; it needs no header of ATen.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

namespace testdev {

constexpr int kMaxDevices = 8;

int device_count();
int current_device();
void set_current_device(int index);

// ---- streams -------------------------------------------------------------------------------------------------------

enum class Engine { None, Compute, CopyIn, CopyOut, Peer };

// A piece of work for a stream. `seconds` is what it takes by the devices' own clock.
struct Work {
  Engine engine = Engine::None;
  std::string name;
  int64_t bytes = 0;
  double seconds = 0;
  std::function<void()> run;
  // Host objects that the work reads; released by a host thread, since they may belong to Python.
  std::vector<std::shared_ptr<void>> keep;
};

// A queue of work with a thread of its own, started with the first piece. Positions count the work submitted so far:
// an event is a stream and a position in it.
class Stream {
 public:
  Stream(int device, int64_t id);
  void submit(Work work);
  // Let this stream wait until `other` has reached `position`, which it reaches at `time` by the devices' clock.
  void wait_for(Stream& other, uint64_t position, double time);
  uint64_t position();
  bool reached(uint64_t position);
  // Block the calling thread until the position is reached; throws what went wrong in this stream's work.
  void finish(uint64_t position);
  void drain();
  // The end of the work submitted so far, by the devices' clock.
  double tail();
  // A held stream runs nothing until somebody waits for it: the latest moment that its waits allow.
  void hold(bool held);

  const int device;
  const int64_t id;

 private:
  void loop();
  void await(uint64_t position);
  void rethrow();

  std::mutex mutex_;
  std::condition_variable arrived_, done_;
  std::deque<Work> queue_;
  uint64_t submitted_ = 0, finished_ = 0, target_ = 0;
  bool held_ = false, started_ = false;
  double tail_ = 0;
  std::mt19937 delays_;
  std::exception_ptr error_;
};

Stream& stream(int device, int64_t id);
Stream& current_stream(int device);
int64_t exchange_stream(int device, int64_t id);
Stream& new_stream(int device);
std::vector<Stream*> streams_of(int device);
void synchronize(int device);

// The host's time by the devices' clock; each host thread has its own.
double host_time();
void host_reached(double time);

// Seconds of the devices' clock for moving or computing this much; zero where no rate is set.
double seconds_to_copy(Engine engine, int64_t bytes);
double seconds_to_compute(double operations, int64_t bytes);

// ---- memory --------------------------------------------------------------------------------------------------------

// Device pointers point into address space without memory; the bytes lie this far behind.
ptrdiff_t hidden_offset(int device);
int device_of(const void* pointer);
bool is_pinned(const void* pointer);
void record_stream(void* pointer, Stream& stream);

}  // namespace testdev
