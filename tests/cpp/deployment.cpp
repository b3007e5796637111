// A program without Python: loads and saves through the header, runs a scripted module and an
// AOTInductor package that load by themselves. tests/python/test_cpp.py makes the folder that it
// is given and reads what it prints: one line for each check that held. Checks that are named are
// the only ones.
#include <ATen/core/dispatch/Dispatcher.h>
#include <tensorizer/tensorizer.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <functional>
#include <iostream>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

void expect(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error("expected: " + what);
}

// Runs something that must fail with an error whose text has `text` in it. TorchScript wraps
// c10::Error into an exception of its own, with the text.
template <typename Error = c10::Error>
void expect_error(const std::string& text, const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    const std::string found = error.what();
    expect(found.find(text) != std::string::npos, "`" + text + "` in: " + found);
    return;
  }
  throw std::runtime_error("expected an error with: " + text);
}

void header(const std::string& folder) {
  const std::string path = folder + "/from_cpp.tensors";
  const auto weight = torch::randn({40, 30});
  const auto bias = torch::arange(5).to(torch::kBFloat16);
  tensorizer::Tensors tensors;
  tensors.insert("weight", weight.t());
  tensors.insert("bias", bias);
  tensorizer::save(path, tensors);
  expect(tensorizer::names(path) == std::vector<std::string>{"weight", "bias"}, "two names");
  tensorizer::LoadOptions options;
  options.verify = true;
  options.num_readers = 2;
  const auto loaded = tensorizer::load(path, options);
  expect(loaded.at("weight").equal(weight.t()), "the weight as saved");
  expect(loaded.at("bias").equal(bias), "the bias as saved");
  const auto one = tensorizer::load(path, std::vector<std::string>{"bias"});
  expect(one.size() == 1 && one[0].equal(bias), "one tensor by its name");
  options = {};
  options.device = c10::Device(c10::kMeta);
  expect(tensorizer::load(path, options).at("weight").is_meta(), "a tensor on the meta device");
  tensorizer::save(path, {"x", "y"}, {bias, weight});
  expect(tensorizer::load(path).at("y").equal(weight), "a list as saved");

  const auto key = torch::arange(32).to(torch::kByte);
  const std::string sealed = folder + "/sealed.tensors";
  tensorizer::save(sealed, tensors, key);
  expect_error("Tensor is encrypted", [&] { tensorizer::load(sealed); });
  options = {};
  options.key = key;
  expect(tensorizer::load(sealed, options).at("bias").equal(bias), "decrypted");
  options.key = key + 1;
  expect_error("Tensor decryption failed", [&] { tensorizer::load(sealed, options); });
}

void in_place(const std::string& folder) {
  const auto expected = tensorizer::load(folder + "/weights.tensors");
  const auto flat = torch::zeros({1300});
  const auto weight = flat.slice(0, 50, 1250).view({40, 30});
  const auto bias = torch::zeros({5}, torch::kLong);
  tensorizer::load_into(folder + "/weights.tensors", {"bias", "weight"}, {bias, weight});
  expect(weight.equal(expected.at("weight")), "the weight in the flat buffer");
  expect(bias.equal(expected.at("bias")), "the bias");
  expect(flat.slice(0, 0, 50).eq(0).all().item<bool>(), "nothing before it");
}

void errors(const std::string& folder) {
  const auto weights = folder + "/weights.tensors";
  expect_error("missing`: No such file", [&] { tensorizer::load(folder + "/missing"); });
  expect_error("missing`: No such file", [&] { tensorizer::names(folder + "/missing"); });
  const auto bias = torch::full({5}, 9, torch::kLong);
  expect_error("Tensor not found: `nothing`",
               [&] { tensorizer::load_into(weights, {"bias", "nothing"}, {bias, bias}); });
  expect_error("tensor `weight`: the file holds torch.float32 [40, 30]", [&] {
    tensorizer::load_into(weights, {"bias", "weight"}, {bias, torch::zeros({3, 3})});
  });
  expect_error("num_readers is 0", [&] {
    tensorizer::LoadOptions options;
    options.num_readers = 0;
    tensorizer::load(weights, options);
  });
  expect(bias.eq(9).all().item<bool>(), "the bias untouched");
  expect_error("is given twice", [&] { tensorizer::save(weights, {"a", "a"}, {bias, bias}); });
  expect_error("Not a directory", [&] { tensorizer::save(weights + "/below", {"a"}, {bias}); });
}

// An operator that the header has no function for.
template <typename Signature>
auto find(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// As docs/reference/cpp.md shows it.
void one_by_one(const std::string& folder) {
  const auto iterate =
      find<int64_t(std::string, std::optional<std::vector<std::string>>, std::optional<c10::Device>,
                   int64_t, std::string, bool, std::optional<int64_t>, std::optional<at::Tensor>)>(
          "tensorizer::iterate");
  const auto next = find<c10::Dict<std::string, at::Tensor>(int64_t)>("tensorizer::iterate_next");
  const auto close = find<void(int64_t)>("tensorizer::iterate_close");
  const auto path = folder + "/weights.tensors";
  const auto expected = tensorizer::load(path);
  const auto begin = [&](const std::string& uri, const std::string& order) {
    const std::vector<std::string> names = {"bias", "weight"};
    return iterate.call(uri, names, c10::Device(c10::kCPU), 1, order, true, {}, {});
  };
  for (const auto* order : {"file", "ready"}) {
    const auto iterator = begin(path, order);
    std::size_t count = 0;
    for (auto some = next.call(iterator); !some.empty(); some = next.call(iterator)) {
      for (const auto& item : some) {
        expect(item.value().equal(expected.at(item.key())), "the tensor as saved");
        ++count;
      }
    }
    expect(count == 2, "every tensor once");
    expect_error("it was closed, or has ended", [&] { next.call(iterator); });
  }
  const auto closed = begin(path, "file");
  next.call(closed);
  close.call(closed);
  close.call(closed);
  expect_error("it was closed, or has ended", [&] { next.call(closed); });
  expect_error("missing`: No such file", [&] { begin(folder + "/missing", "file"); });
  expect_error("expected \"file\" or \"ready\"", [&] { begin(path, "name"); });
  // One that is open when the program ends.
  next.call(begin(path, "file"));
}

void other_formats(const std::string& folder) {
  const auto expected = tensorizer::load(folder + "/weights.tensors");
  // One file, two shards by their index, the folder that holds them.
  for (const auto* name :
       {"/weights.safetensors", "/shards/model.safetensors.index.json", "/shards"}) {
    const auto path = folder + name;
    const auto loaded = tensorizer::load(path);
    expect(loaded.size() == expected.size(), "as many tensors in " + path);
    expect(tensorizer::names(path).size() == expected.size(), "as many names in " + path);
    const auto flat = torch::zeros({1203});
    tensorizer::load_into(path, {"weight"}, {flat.slice(0, 3).view({40, 30})});
    expect(flat.slice(0, 3).view({40, 30}).equal(expected.at("weight")), "the weight in place");
    const auto one = tensorizer::load(path, std::vector<std::string>{"bias"});
    expect(one[0].equal(expected.at("bias")) && loaded.at("bias").equal(one[0]), "the bias");
    expect_error("safetensors files hold no hashes", [&] {
      tensorizer::LoadOptions options;
      options.verify = true;
      tensorizer::load(path, options);
    });
  }
  const auto pickled = folder + "/checkpoint.pt";
  expect_error("torch.save", [&] { tensorizer::load(pickled); });
  expect_error("torch.save", [&] { tensorizer::names(pickled); });
}

void scripted(const std::string& folder) {
  const auto x = torch::ones({2, 40});
  const auto expected = tensorizer::load(folder + "/expected.tensors").at("scripted");
  for (const auto* name : {"/scripted.pt", "/one_by_one.pt"}) {
    auto module = torch::jit::load(folder + name);
    for (int round = 0; round < 3; ++round) {
      expect(module.forward({x}).toTensor().allclose(expected), "what Python computed");
    }
  }
  expect_error<std::exception>("missing`: No such file",
                               [&] { torch::jit::load(folder + "/broken.pt").forward({x}); });
}

void aot_inductor(const std::string& folder) {
  torch::inductor::AOTIModelPackageLoader package(folder + "/model.pt2");
  const auto expected = tensorizer::load(folder + "/expected.tensors").at("compiled");
  for (int round = 0; round < 3; ++round) {
    const auto found = package.run({torch::ones({2, 40})});
    expect(found.size() == 1 && found[0].allclose(expected), "what Python computed");
  }
}

void threads(const std::string& folder) {
  const auto path = folder + "/weights.tensors";
  const auto expected = tensorizer::load(path).at("weight");
  std::vector<std::string> failures(4);
  std::vector<std::thread> running;
  for (std::size_t at = 0; at < failures.size(); ++at) {
    running.emplace_back([&, at] {
      try {
        for (int round = 0; round < 50; ++round) {
          expect(tensorizer::load(path).at("weight").equal(expected), "the same weight");
        }
      } catch (const std::exception& error) {
        failures[at] = error.what();
      }
    });
  }
  for (auto& thread : running) thread.join();
  for (const auto& failure : failures) expect(failure.empty(), "no failure, found " + failure);
}

void no_python(const std::string&) {
  std::ifstream maps("/proc/self/maps");
  std::string line;
  bool tensorizer = false;
  while (std::getline(maps, line)) {
    expect(line.find("libpython") == std::string::npos, "no Python in the process");
    expect(line.find("torch_python") == std::string::npos, "no torch_python in the process");
    tensorizer |= line.find("libtensorizer_torch.so") != std::string::npos;
  }
  expect(tensorizer, "libtensorizer_torch.so in the process");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: deployment FOLDER [CHECK...]\n";
    return 2;
  }
  const std::vector<std::string> only(argv + 2, argv + argc);
  const std::pair<const char*, void (*)(const std::string&)> checks[] = {
      {"header", header},
      {"in place", in_place},
      {"errors", errors},
      {"one by one", one_by_one},
      {"other formats", other_formats},
      {"scripted", scripted},
      {"aot_inductor", aot_inductor},
      {"threads", threads},
      {"no python", no_python},
  };
  for (const auto& [name, check] : checks) {
    if (!only.empty() && std::find(only.begin(), only.end(), name) == only.end()) continue;
    try {
      check(argv[1]);
    } catch (const std::exception& error) {
      std::cerr << name << ": " << error.what() << "\n";
      return 1;
    }
    std::cout << name << std::endl;
  }
  return 0;
}
