// Streams, the devices' clock and its trace.

#include "device.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

namespace testdev {
namespace {

struct Settings {
  std::atomic<int> devices{2};
  std::atomic<unsigned> seed{0};
  std::atomic<int> longest_delay{0};  // microseconds
  std::atomic<double> operations{0}, memory{0}, copy_in{0}, copy_out{0}, peer{0};  // per second
  std::atomic<bool> tracing{false};
};

Settings& settings() {
  static auto* held = new Settings();
  return *held;
}

struct Traced {
  int device;
  int64_t stream;
  Engine engine;
  std::string name;
  int64_t bytes;
  double start, end;
};

struct Device {
  std::mutex mutex;
  std::vector<std::unique_ptr<Stream>> streams;
  // When each engine is free again, by the devices' clock: two streams share one copy engine.
  double free_at[5] = {0, 0, 0, 0, 0};
};

struct World {
  Device devices[kMaxDevices];
  std::mutex clock;  // guards free_at, the streams' tails and the trace
  std::vector<Traced> trace;
  std::mutex leaving;
  std::vector<std::shared_ptr<void>> leavers;
};

// Never destroyed: threads of streams may outlive static destructors.
World& world() {
  static auto* held = new World();
  return *held;
}

thread_local int device_now = 0;
thread_local int64_t streams_now[kMaxDevices] = {0};
thread_local double host_now = 0;

void release_leavers() {
  std::vector<std::shared_ptr<void>> leavers;
  {
    std::lock_guard<std::mutex> lock(world().leaving);
    leavers.swap(world().leavers);
  }
}

}  // namespace

int device_count() { return settings().devices; }
int current_device() { return device_now; }

void set_current_device(int index) {
  if (index < 0 || index >= device_count()) throw std::runtime_error("there is no such device of the test accelerator");
  device_now = index;
}

double host_time() { return host_now; }
void host_reached(double time) { host_now = std::max(host_now, time); }

double seconds_to_copy(Engine engine, int64_t bytes) {
  auto& s = settings();
  double rate = engine == Engine::CopyIn ? s.copy_in : engine == Engine::CopyOut ? s.copy_out : s.peer;
  return rate > 0 ? bytes / rate : 0;
}

double seconds_to_compute(double operations, int64_t bytes) {
  auto& s = settings();
  double computing = s.operations > 0 ? operations / s.operations : 0;
  double moving = s.memory > 0 ? bytes / s.memory : 0;
  return std::max(computing, moving);
}

Stream::Stream(int device, int64_t id) : device(device), id(id) {
  std::seed_seq seed{settings().seed.load(), unsigned(device), unsigned(id)};
  delays_.seed(seed);
}

void Stream::submit(Work work) {
  release_leavers();
  {
    std::lock_guard<std::mutex> lock(world().clock);
    auto& free_at = world().devices[device].free_at[int(work.engine)];
    double start = std::max(host_now, tail_);
    if (work.seconds > 0) start = std::max(start, free_at);
    tail_ = start + work.seconds;
    if (work.seconds > 0) free_at = tail_;
    if (settings().tracing && work.engine != Engine::None)
      world().trace.push_back({device, id, work.engine, work.name, work.bytes, start, tail_});
  }
  std::lock_guard<std::mutex> lock(mutex_);
  queue_.push_back(std::move(work));
  ++submitted_;
  if (!started_) {
    started_ = true;
    std::thread([this] { loop(); }).detach();
  }
  arrived_.notify_one();
}

void Stream::wait_for(Stream& other, uint64_t position, double time) {
  if (&other == this) return;
  {
    std::lock_guard<std::mutex> lock(world().clock);
    tail_ = std::max(tail_, time);
  }
  Work work;
  work.run = [&other, position] { other.await(position); };
  submit(std::move(work));
}

uint64_t Stream::position() {
  std::lock_guard<std::mutex> lock(mutex_);
  return submitted_;
}

bool Stream::reached(uint64_t position) {
  std::lock_guard<std::mutex> lock(mutex_);
  return finished_ >= position;
}

void Stream::await(uint64_t position) {
  std::unique_lock<std::mutex> lock(mutex_);
  target_ = std::max(target_, position);
  arrived_.notify_one();
  done_.wait(lock, [&] { return finished_ >= position; });
}

void Stream::rethrow() {
  std::exception_ptr error;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    std::swap(error, error_);
  }
  if (error) std::rethrow_exception(error);
}

void Stream::finish(uint64_t position) {
  await(position);
  release_leavers();
  rethrow();
}

void Stream::drain() {
  uint64_t last = position();
  double end = tail();
  finish(last);
  host_reached(end);
}

double Stream::tail() {
  std::lock_guard<std::mutex> lock(world().clock);
  return std::max(tail_, host_now);
}

void Stream::hold(bool held) {
  std::lock_guard<std::mutex> lock(mutex_);
  held_ = held;
  arrived_.notify_one();
}

void Stream::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    arrived_.wait(lock, [&] { return finished_ < submitted_ && (!held_ || finished_ < target_); });
    Work work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    int longest = settings().longest_delay;
    // Copies are late often, kernels seldom: training has thousands of them.
    unsigned one_in = work.engine == Engine::Compute ? 64 : 2;
    if (longest > 0 && work.engine != Engine::None && delays_() % one_in == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(delays_() % longest));
    std::exception_ptr error;
    try {
      work.run();
    } catch (...) {
      error = std::current_exception();
    }
    work.run = nullptr;
    if (!work.keep.empty()) {
      std::lock_guard<std::mutex> leaving(world().leaving);
      for (auto& kept : work.keep) world().leavers.push_back(std::move(kept));
    }
    lock.lock();
    if (error && !error_) error_ = error;
    ++finished_;
    done_.notify_all();
  }
}

Stream& stream(int device, int64_t id) {
  auto& d = world().devices[device];
  std::lock_guard<std::mutex> lock(d.mutex);
  while (int64_t(d.streams.size()) <= id) d.streams.emplace_back(new Stream(device, d.streams.size()));
  return *d.streams[id];
}

Stream& new_stream(int device) {
  auto& d = world().devices[device];
  std::unique_lock<std::mutex> lock(d.mutex);
  int64_t id = std::max<int64_t>(1, d.streams.size());  // 0 is the default stream
  lock.unlock();
  return stream(device, id);
}

Stream& current_stream(int device) { return stream(device, streams_now[device]); }

int64_t exchange_stream(int device, int64_t id) { return std::exchange(streams_now[device], id); }

std::vector<Stream*> streams_of(int device) {
  auto& d = world().devices[device];
  std::lock_guard<std::mutex> lock(d.mutex);
  std::vector<Stream*> found;
  for (auto& each : d.streams) found.push_back(each.get());
  return found;
}

void synchronize(int device) {
  for (Stream* each : streams_of(device)) each->drain();
}

}  // namespace testdev

// ---- for Python ----------------------------------------------------------------------------------------------------

using namespace testdev;

extern "C" {

int testdev_device_count() { return device_count(); }
int testdev_current_device() { return current_device(); }

void testdev_configure(int devices, unsigned seed, int longest_delay) {
  settings().devices = std::min(devices, kMaxDevices);
  settings().seed = seed;
  settings().longest_delay = longest_delay;
}

void testdev_rates(double operations, double memory, double copy_in, double copy_out, double peer) {
  settings().operations = operations;
  settings().memory = memory;
  settings().copy_in = copy_in;
  settings().copy_out = copy_out;
  settings().peer = peer;
}

void testdev_hold(int device, int64_t id, int held) { stream(device, id).hold(held); }

double testdev_host_time() { return host_now; }
void testdev_set_host_time(double time) { host_now = time; }

void testdev_trace(int on) {
  std::lock_guard<std::mutex> lock(world().clock);
  settings().tracing = on;
  if (on) world().trace.clear();
}

// Copies the trace, a line for each piece of work, into `text`; returns the bytes that the whole trace has.
int64_t testdev_read_trace(char* text, int64_t room) {
  static const char* engines[] = {"none", "compute", "in", "out", "peer"};
  std::ostringstream lines;
  lines.precision(17);
  std::lock_guard<std::mutex> lock(world().clock);
  for (auto& t : world().trace)
    lines << t.device << ' ' << t.stream << ' ' << engines[int(t.engine)] << ' ' << t.name << ' ' << t.bytes << ' '
          << t.start << ' ' << t.end << '\n';
  std::string all = lines.str();
  std::memcpy(text, all.data(), std::min<int64_t>(room, all.size()));
  return all.size();
}
}
