// Device guard and hooks of "cuda" for a CPU build of torch, so that autograd and fake tensors accept cuda devices.
// Nothing is computed. Built and loaded by guard.py, before torch is imported: torch looks both up when it starts.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace c10::impl {

// One device, one stream, events that have always happened.
struct FakeCudaGuard : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static Device only() { return Device(DeviceType::CUDA, 0); }
  Device getDevice() const override { return only(); }
  Device exchangeDevice(Device) const override { return only(); }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, only()); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeCudaGuard)

}  // namespace c10::impl

namespace at {

// The registry finds the hooks of CUDA by the name of this struct.
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at
