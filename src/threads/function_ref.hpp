// FunctionRef: a reference to anything callable that outlives the call it is passed to. Unlike
// std::function it never allocates.
#pragma once

#include <memory>
#include <type_traits>

namespace regard {

template <class Signature>
class FunctionRef;

template <class... Arguments>
class FunctionRef<void(Arguments...)> {
 public:
  template <class Callable>
    requires(!std::is_same_v<Callable, FunctionRef>)
  FunctionRef(const Callable& callable)
      : callable_(std::addressof(callable)), call_([](const void* it, Arguments... arguments) {
          (*static_cast<const Callable*>(it))(arguments...);
        }) {}

  void operator()(Arguments... arguments) const { call_(callable_, arguments...); }

 private:
  const void* callable_;
  void (*call_)(const void*, Arguments...);
};

}  // namespace regard
