// Serves a model without Python: loads the code from one file and the weights from another,
// answers one request, a line of numbers, from standard input.
//
//     server MODEL WEIGHTS < request.txt
//
// MODEL is a scripted module (model.pt) or an AOTInductor package (model.pt2), WEIGHTS whatever
// tensorizer::load takes.
#include <tensorizer/tensorizer.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

#include <chrono>
#include <functional>
#include <iostream>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr std::int64_t kFeatures = 16;

using Model = std::function<at::Tensor(const at::Tensor&)>;

// Weights are read straight into the parameters and buffers that the module has.
Model scripted(const std::string& path, const std::string& weights) {
  auto module = torch::jit::load(path);
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  for (const auto& parameter : module.named_parameters()) {
    names.push_back(parameter.name);
    tensors.push_back(parameter.value);
  }
  for (const auto& buffer : module.named_buffers()) {
    names.push_back(buffer.name);
    tensors.push_back(buffer.value);
  }
  tensorizer::load_into(weights, names, tensors);
  return [module](const at::Tensor& x) mutable { return module.forward({x}).toTensor(); };
}

// The package takes tensors over as they are loaded.
Model compiled(const std::string& path, const std::string& weights) {
  auto package = std::make_shared<torch::inductor::AOTIModelPackageLoader>(path);
  const auto names = package->get_constant_fqns();
  const auto tensors = tensorizer::load(weights, names);
  std::unordered_map<std::string, at::Tensor> constants;
  for (std::size_t at = 0; at < names.size(); ++at) constants.emplace(names[at], tensors[at]);
  package->load_constants(constants, /*use_inactive=*/false, /*check_full_update=*/true);
  return [package](const at::Tensor& x) { return package->run({x}).at(0); };
}

at::Tensor read_request(std::istream& in) {
  std::string line;
  std::getline(in, line);
  std::istringstream words(line);
  std::vector<float> numbers;
  for (float number = 0; words >> number;) numbers.push_back(number);
  TORCH_CHECK(words.eof() && numbers.size() == kFeatures, "expected ", kFeatures,
              " numbers, found `", line, "`");
  return torch::tensor(numbers).view({1, kFeatures});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: server MODEL WEIGHTS < request.txt\n";
    return 2;
  }
  try {
    const c10::InferenceMode inference;
    const auto start = std::chrono::steady_clock::now();
    const std::string path = argv[1];
    const bool is_package = path.size() > 4 && path.substr(path.size() - 4) == ".pt2";
    const auto model = is_package ? compiled(path, argv[2]) : scripted(path, argv[2]);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::cerr << "ready after " << took.count() << " s\n";
    std::cout.precision(9);
    const auto answer = model(read_request(std::cin)).flatten();
    for (std::int64_t at = 0; at < answer.numel(); ++at) {
      std::cout << (at == 0 ? "" : " ") << answer[at].item<float>();
    }
    std::cout << std::endl;
  } catch (const c10::Error& error) {
    std::cerr << "server: " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "server: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
