// Continues a sequence of tokens with a model that `tfkit export --format torchscript` wrote: greedy, each token read
// once, no Python.
//
//     generate MODEL N PROMPT [SOURCE]
//
// PROMPT and SOURCE are token ids, `464,3290`; SOURCE is what the encoder reads, where there is one, and PROMPT is then
// where the decoder begins. Prints the N ids that follow.

#include <torch/script.h>

#include <charconv>
#include <cstdint>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

int64_t read_number(const std::string& text) {
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  if (std::from_chars(text.data(), end, number).ptr != end) throw std::invalid_argument("`" + text + "` is no number");
  return number;
}

// "464,3290" as a tensor [1, 2].
torch::Tensor read_ids(const std::string& text) {
  std::vector<int64_t> ids;
  std::istringstream words(text);
  for (std::string word; std::getline(words, word, ',');) ids.push_back(read_number(word));
  if (ids.empty()) throw std::invalid_argument("there are no token ids in `" + text + "`");
  return torch::tensor(ids, torch::kLong).unsqueeze(0);
}

std::vector<int64_t> generate(torch::jit::Module& model, int64_t n, torch::Tensor tokens,
                              const std::vector<c10::IValue>& read_once) {
  const int64_t batch = 1, length = tokens.size(1) + n;  // the caches have a place for every token
  std::vector<c10::IValue> beginning = {batch, length};
  beginning.insert(beginning.end(), read_once.begin(), read_once.end());

  // The state is a dictionary of tensors that `step` changes; nothing needs to look inside.
  const c10::IValue state = model.get_method("start")(beginning);
  torch::jit::Method step = model.get_method("step");

  std::vector<int64_t> found;
  while (static_cast<int64_t>(found.size()) < n) {
    // Logits [batch, keep, vocab_size] of the last position alone. A mask of padding would stand behind the tokens.
    const torch::Tensor logits = step({state, tokens}, {{"keep", static_cast<int64_t>(1)}}).toTensor();
    tokens = logits.select(1, -1).argmax(-1, /*keepdim=*/true);
    found.push_back(tokens.item<int64_t>());
  }
  return found;
}

int main(int argc, char** argv) {
  if (argc < 4 || argc > 5) {
    std::cerr << "usage: generate MODEL N PROMPT [SOURCE]\n";
    return 2;
  }
  try {
    const int64_t n = read_number(argv[2]);
    const torch::Tensor prompt = read_ids(argv[3]);
    std::vector<c10::IValue> read_once;
    if (argc == 5) read_once.push_back(read_ids(argv[4]));

    const c10::InferenceMode no_gradients;
    torch::jit::Module model = torch::jit::load(argv[1]);
    if (!model.find_method("step")) throw std::invalid_argument("the model cannot be decoded token by token");
    const std::vector<int64_t> found = generate(model, n, prompt, read_once);
    for (std::size_t i = 0; i < found.size(); ++i) std::cout << (i ? "," : "") << found[i];
    std::cout << "\n";
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
}
