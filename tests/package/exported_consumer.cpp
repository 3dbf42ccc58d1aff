#include <iostream>

#include <snug/exported/exported_module.h>
#include <snug/snug.h>

int main(int, char** argv) {
  try {
    snug::load_exported(argv[0]);
  } catch (const snug::CorruptFile& error) {  // thrown by snug_exported, of a type of snug
    std::cout << "exported_consumer: " << error.what() << "; " << snug::live_bytes(torch::kCPU).str() << " alive\n";
    return 0;
  }
  return 1;
}
