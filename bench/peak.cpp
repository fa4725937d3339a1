// Prints the FLOP/s that the instruction behind each type's kernel reaches in registers:
// one line a type, "f32 2.35e+11". Arguments: threads, and optionally a backend.
#include <cstdio>
#include <cstdlib>
#include <regard/regard.hpp>

int main(int count, char** arguments) {
  regard::Run run;
  if (count > 1) run.threads = std::atoi(arguments[1]);
  if (count > 2) run.backend = arguments[2];
  for (const regard::Type type : {regard::f64, regard::f32, regard::f16, regard::bf16}) {
    std::printf("%s %.4e\n", regard::name_of(type), regard::measured_peak(type, run));
  }
}
