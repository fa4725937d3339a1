// Two devices that run nothing: the image of a kernel is the text that fake_nvrtc.cpp was given.
#include <cstdlib>

#include "tests/cuda/driver.hpp"

namespace regard::fake {

namespace {

struct Text : Kernel {
  explicit Text(const char* text) : text(text) {}
  int ptx_version() const override {
    const char kTarget[] = "--gpu-architecture=";  // the text names what it was compiled with
    return std::atoi(text.c_str() + text.find('_', text.find(kTarget)) + 1);
  }
  std::string image() const override { return text; }
  int run(const Launch&, void**, std::string&) override { return kOk; }

  std::string text;
};

}  // namespace

const int kDevices = 2;
const Chip* device_chip() { return chip_named("sm_90"); }
std::string device_name() { return "Fake GPU"; }
Kernel* load(const void* image, std::string&) { return new Text(static_cast<const char*>(image)); }

}  // namespace regard::fake
