// Copies a file of tensors: program FROM TO.
#include <tensorizer/tensorizer.h>

#include <cstdio>
#include <exception>

int main(int argc, char** argv) {
  try {
    TORCH_CHECK(argc == 3, "program FROM TO");
    tensorizer::save(argv[2], tensorizer::load(argv[1]));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
