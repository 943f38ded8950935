"""Every claim of the papers: its number, what ours is read from, and what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from experiments.catalogue import BPPSA, DEER, MGRIT
from experiments.harness import Results
from experiments.readings import (
    Told,
    accuracy_cost,
    best_of,
    bitstream_backward,
    bitstream_training,
    coarse_steps,
    exactness,
    gradient_errors,
    instruments,
    length_speedup,
    preprocessors,
    pruned_vgg,
    ranks_speedup,
    stored,
    ways_accuracy,
    workers,
    zeros,
)
from experiments.readings_deer import (
    grid_best,
    pixel_images,
    small_and_long,
    sweeps,
    two_bodies,
    two_bodies_learned,
    warm_starts,
    worms,
    worms_accuracy,
)


@dataclass(frozen=True)
class Claim:
    """What a paper says, what we found, and what differs."""

    paper: str
    says: str
    number: str
    """The paper's."""
    results: tuple[str, ...]
    """Stored results that ours is read from, the first that is there."""
    ours: Callable[[Results], Told]
    differs: str
    command: str
    """Without `python -m experiments.` in front."""

    def found(self) -> tuple[Told, str | None]:
        """Ours in words, and the result that it was read from."""
        for name in self.results:
            kept = stored(name)
            if kept is not None:
                return self.ours(kept), name
        return Told("not measured yet"), None


GENERATED = "Generated data stand in where the real files are not given (`--data`)."
CLAIMS = (
    Claim(
        MGRIT,
        "One sequence over many processes trains faster than serially",
        "up to 6.5× over the serial GRU, HMDB51, 128 frames",
        ("mgrit/ranks",),
        ranks_speedup,
        "Processes of one machine, one thread each; random inputs; the paper has several nodes of 4 ranks × 9 threads. "
        "Serial runs have as many threads as help, and ours are compiled: a step over processes takes some 10 ms of "
        "Python, which short sequences do not earn back.",
        "mgrit.ranks",
    ),
    Claim(
        MGRIT,
        "… a larger network",
        "the same",
        ("mgrit/ranks_100x10",),
        ranks_speedup,
        "Threads share the batch of the serial runs, and processes share time.",
        "mgrit.ranks",
    ),
    Claim(
        MGRIT,
        "… by preprocessor: ResNet-18, 34 and 50",
        "up to 6.5×",
        ("mgrit_hmdb51/nets",),
        preprocessors,
        "Noise and random weights, which change no time; smaller frames and batches, and fewer processes. Features "
        "are kept in all other experiments, so only the first epoch makes them.",
        "mgrit_hmdb51.nets",
    ),
    Claim(
        MGRIT,
        "The gain grows with the length",
        "stated, without a number for other lengths",
        ("mgrit/scaling_cuda", "mgrit/scaling_cpu"),
        length_speedup,
        "One device, chunks side by side in place of ranks; a GRU, exact to tolerance, not the "
        "published inexact cycles.",
        "mgrit.scaling",
    ),
    Claim(
        MGRIT,
        "Accuracy on HMDB51 is that of serial training",
        "classic ≈ implicit ≈ parallel",
        ("mgrit_hmdb51/HMDB51_hmdb6_9_1", "mgrit_hmdb51/HMDB51_hmdb6", "mgrit_hmdb51/generated"),
        ways_accuracy,
        f"{GENERATED} The net on them has random weights.",
        "mgrit_hmdb51.run",
    ),
    Claim(
        MGRIT,
        "… on a GPU, in the setting of the published example",
        "not reported",
        ("mgrit_har/har_cuda", "mgrit_har/generated_cuda"),
        ways_accuracy,
        f"{GENERATED} 128 steps, which cuDNN is hard to beat at.",
        "mgrit_har.run --device cuda",
    ),
    Claim(
        MGRIT,
        "The published example, UCI-HAR",
        "a log of the published code has 87 % with its own inexact inference, 84 % serially",
        ("mgrit_har/har", "mgrit_har/generated"),
        ways_accuracy,
        f"{GENERATED} Epochs are ours.",
        "mgrit_har.run",
    ),
    Claim(
        MGRIT,
        "A fixed number of cycles is enough",
        "2 cycles forward, 1 backward, in the command published with its code",
        ("mgrit/accuracy",),
        accuracy_cost,
        "Small real series sets (five seeds, serial inference with the trained weights): the published setting is "
        "not harmless on all of them.",
        "mgrit.accuracy",
    ),
    Claim(
        MGRIT,
        "… and its gradients",
        "not reported",
        ("mgrit/gradient_error",),
        gradient_errors,
        "Ours: random inputs, T = 128, float64.",
        "mgrit.gradient_error",
    ),
    Claim(
        MGRIT,
        "The classic GRU's step is unstable on coarse grids, the implicit one is not",
        "shown by its theory and accuracy",
        ("mgrit/instability",),
        coarse_steps,
        "Residuals of the forward solve of a GRU; frozen gates are timeloom's default coarse step.",
        "mgrit.instability",
    ),
    Claim(
        BPPSA,
        "The backward pass is faster as a scan",
        "up to 108× (arXiv), 8.8× (proceedings), on GPUs",
        ("bppsa_bitstream/grid_rnn_cuda", "bppsa_bitstream/grid_rnn_cpu"),
        best_of("backward"),
        "Against torch's layer: cuDNN on a GPU. On a CPU the default scan multiplies no matrices: it is the "
        "compiled sweep in order.",
        "bppsa_bitstream.grid",
    ),
    Claim(
        BPPSA,
        "A training step is faster",
        "up to 2.75×",
        ("bppsa_bitstream/grid_rnn_cuda", "bppsa_bitstream/grid_rnn_cpu"),
        best_of("both"),
        "Our forward pass is parallel in time too; the paper's is serial.",
        "bppsa_bitstream.grid",
    ),
    Claim(
        BPPSA,
        "Bit streams by length, B = 16",
        "speedup grows to T = 30,000",
        ("bppsa_bitstream/bitstream_cuda", "bppsa_bitstream/bitstream"),
        bitstream_backward,
        "Backward pass alone. Products of matrices do not pay on a CPU.",
        "bppsa_bitstream.run",
    ),
    Claim(
        BPPSA,
        "… and their training",
        "same loss curve, 80 epochs of 32,000 streams at 1e-5",
        ("bppsa_bitstream/bitstream_paper", "bppsa_bitstream/bitstream"),
        bitstream_training,
        "1,000 steps of new streams at 3e-3; `--protocol paper` has the paper's.",
        "bppsa_bitstream.run",
    ),
    Claim(
        BPPSA,
        "A GRU on IRMAS, three lengths",
        "within the numbers above",
        ("bppsa_irmas/irmas_cuda", "bppsa_irmas/irmas", "bppsa_irmas/generated_cuda", "bppsa_irmas/generated"),
        instruments,
        f"{GENERATED} Inputs are 20 MFCC of one channel; `--features paper` has the paper's 38, 24 and 12.",
        "bppsa_irmas.run",
    ),
    Claim(
        BPPSA,
        "The scan is exact",
        "same convergence",
        ("bppsa_irmas/irmas", "bppsa_irmas/generated_cuda", "bppsa_irmas/generated"),
        exactness,
        "Gradients are compared too, not curves alone.",
        "bppsa_irmas.run",
    ),
    Claim(
        BPPSA,
        "Retraining a pruned VGG-11 is a practical use",
        "fewer FLOPs along the critical path than back-propagation",
        ("bppsa_vgg/cifar10", "bppsa_vgg/generated_cuda", "bppsa_vgg/generated"),
        pruned_vgg,
        f"{GENERATED} FLOPs are what a machine with a processor for each product could gain; in one process the "
        "scan is far slower than autograd, on a GPU too.",
        "bppsa_vgg.run",
    ),
    Claim(
        BPPSA,
        "Jacobians are mostly zeros that are known beforehand",
        "a table of zeros, and of generation times against autograd",
        ("bppsa_vgg/cifar10", "bppsa_vgg/generated_cuda", "bppsa_vgg/generated"),
        zeros,
        "One image at a time; autograd's columns are timed for some and counted for all.",
        "bppsa_vgg.run",
    ),
    Claim(
        BPPSA,
        "Θ(log n) steps scale with workers",
        "a complexity, and FLOPs along the critical path",
        ("bppsa_vgg/ranks",),
        workers,
        "Products of a level over processes of one machine. Each process writes all Jacobians down and makes all of "
        "the layers' own gradients, and matrices are exchanged: FLOPs alone say what is left without that.",
        "bppsa_vgg.ranks",
    ),
    Claim(
        DEER,
        "Evaluation on a GPU is faster by up to 3 orders of magnitude",
        "against its sequential loop (JAX's scan)",
        ("deer/grid_cuda",),
        grid_best("DEER", "DEER, captured", "shooting", "default", base="loop", key="forward_ms"),
        "Against a loop of `GRUCell`, each step some launches from Python; beyond 500 steps the loop is scaled.",
        "deer.grid",
    ),
    Claim(
        DEER,
        "… and against torch's own layer",
        "not reported",
        ("deer/grid_cuda", "deer/grid_cpu"),
        grid_best("DEER", "DEER, captured", "quasi-DEER", "ELK", "shooting", "default"),
        "cuDNN is a far better loop than JAX's scan.",
        "deer.grid",
    ),
    Claim(
        DEER,
        "… where states are small and one sequence is long",
        "largest gains there",
        ("deer/grid_cuda",),
        small_and_long,
        "Against cuDNN. Jacobians never leave the chip (n ≤ 32).",
        "deer.grid",
    ),
    Claim(
        DEER,
        "Newton's iteration converges in few sweeps",
        "quadratic",
        ("deer/iterations",),
        sweeps,
        "One seed a network.",
        "deer.iterations",
    ),
    Claim(
        DEER,
        "Training is more than 10 times as fast: EigenWorms",
        "25× a step over JAX's scan",
        ("deer_eigenworms/eigenworms", "deer_eigenworms/generated"),
        worms,
        f"{GENERATED} By the default solver (chunks side by side), against `torch.nn.GRU`.",
        "deer_eigenworms.run",
    ),
    Claim(
        DEER,
        "… on a GPU",
        "25× a step over JAX's scan",
        ("deer_eigenworms/eigenworms_cuda", "deer_eigenworms/generated_cuda"),
        worms,
        f"{GENERATED} Against cuDNN; a whole training step with norms, perceptrons and optimizer, run eagerly.",
        "deer_eigenworms.run --device cuda",
    ),
    Claim(
        DEER,
        "A GRU on EigenWorms",
        "88.0 ± 4.4 % (3 seeds)",
        ("deer_eigenworms/eigenworms", "deer_eigenworms/generated"),
        worms_accuracy,
        "Generated worms say nothing about the real set; `--data EigenWorms --protocol paper --twin` has seeds, "
        "split and a twin by torch.",
        "deer_eigenworms.run",
    ),
    Claim(
        DEER,
        "A Hamiltonian network on two bodies, 800/100/100 orbits",
        "more than 10 times as fast",
        ("deer_two_body/two_body_paper_cuda", "deer_two_body/two_body"),
        two_bodies,
        "The loop takes the same Runge–Kutta steps, so that gradients can be compared to rounding.",
        "deer_two_body.run",
    ),
    Claim(
        DEER,
        "… and what it learns",
        "same validation loss",
        ("deer_two_body/two_body",),
        two_bodies_learned,
        "Four orbits and a given kinetic energy; `--size paper` has the paper's orbits and the whole energy learned.",
        "deer_two_body.run",
    ),
    Claim(
        DEER,
        "A multi-head strided GRU on sequential CIFAR-10",
        "90.25 %",
        ("deer_cifar/cifar10_large_cuda", "deer_cifar/generated_large_cuda"),
        pixel_images,
        f"{GENERATED} 192 GRUs of 8 units and 8 to 1,024 steps: the host starts each of them, and needs least for "
        "cuDNN.",
        "deer_cifar.run --size large --device cuda",
    ),
    Claim(
        DEER,
        "… a smaller one on a CPU",
        "not reported",
        ("deer_cifar/cifar10", "deer_cifar/generated"),
        pixel_images,
        f"{GENERATED} A smaller network and fewer epochs.",
        "deer_cifar.run",
    ),
    Claim(
        DEER,
        "The last epoch's states are a good guess",
        "used, not measured",
        ("deer/warm_cuda", "deer/warm"),
        warm_starts,
        "A small task that is learned on the way.",
        "deer.warm",
    ),
)
