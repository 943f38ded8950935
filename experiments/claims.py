"""Every claim of the papers: its number, what ours is read from, and what differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from experiments.catalogue import BPPSA, DEER, MGRIT
from experiments.deer import published
from experiments.deer.grid_report import PASSES
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
    beside_the_paper,
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


def _published(key: str) -> str:
    """The paper's best speedup of a pass, in words."""
    ratio, n, steps = published.best(key)
    return f"{ratio:,.0f}× {PASSES[key]} (n = {n}, T = {steps:,})"


GENERATED = "Generated data stand in where the real files are not given (`--data`)."
CLAIMS = (
    Claim(
        MGRIT,
        "One sequence over many processes trains faster than serially",
        "up to 6.5× over the serial GRU: HMDB51, 128 frames, up to 32 ranks of 9 threads",
        ("mgrit/ranks",),
        ranks_speedup,
        "**Not reached at the paper's length**: there more than two processes are slower than any serial run; at the "
        "longest, two of them do nearly what 16 do. **The published cycles are slower than the compiled serial run at "
        "every length.** Torch's serial GRU has one thread, and is timed over 2,048 steps and scaled, a length at "
        "which a step takes it almost twice as long as at 1,024. Random inputs in place of video; processes of one "
        "machine, one thread each. Compiled serial runs have as many threads as help: a step over processes takes "
        "some 10 ms of Python, which short sequences do not earn back. Rows were measured on several days, under "
        "other loads (table); those of this comparison are older than the present kernels. **The newest run, of all "
        "rows at T = 16,384 without other load, has processes at 0.59 times the best serial one** (`ranks_rounds`; "
        "its serial run takes 11 ms in place of 42); the three before had 1.7, 2.3 and 2.4 times.",
        "mgrit.ranks",
    ),
    Claim(
        MGRIT,
        "… every row of one run",
        "the same",
        ("mgrit/ranks_rounds",),
        ranks_speedup,
        "One length, medians of three rounds of all rows, with nothing beside them; torch's serial GRU is timed over "
        "all steps. Else as above.",
        "mgrit.ranks --steps 16384 --rounds 3",
    ),
    Claim(
        MGRIT,
        "… a larger network",
        "the same",
        ("mgrit/ranks_100x10",),
        ranks_speedup,
        "One length; torch's serial GRU is timed over fewer steps and scaled. Threads share the batch of the serial "
        "runs, and processes share time.",
        "mgrit.ranks --hidden 100 --batch 10",
    ),
    Claim(
        MGRIT,
        "… by preprocessor: ResNet-18, 34 and 50",
        "up to 6.5×, frames of 240 × 240, batch 100",
        ("mgrit_hmdb51/nets",),
        preprocessors,
        "All of the gain is that of features, which one thread makes for the serial network: where they are kept, "
        "**processes are slower than one**, as 128 steps are few. Other work held two of the cores at times. Noise "
        "and random weights, which change no time. Features are kept in all other experiments, so only the first "
        "epoch makes them.",
        "mgrit_hmdb51.nets",
    ),
    Claim(
        MGRIT,
        "The gain grows with the length",
        "stated, without a number for other lengths",
        ("mgrit/scaling_cuda", "mgrit/scaling_cpu"),
        length_speedup,
        "One device, chunks side by side in place of ranks; a GRU, exact to tolerance, not the published inexact "
        "cycles. **With a long memory multigrid loses to cuDNN**: a dozen cycles do not reach the default tolerance "
        "from 1,024 steps on, and the run in order that follows is exact.",
        "mgrit.scaling --device cuda",
    ),
    Claim(
        MGRIT,
        "Accuracy on HMDB51 is that of serial training",
        "classic ≈ implicit ≈ parallel; 6 classes, 1,157 clips to train and 129 to test on (9:1)",
        ("mgrit_hmdb51/HMDB51_hmdb6_9_1", "mgrit_hmdb51/HMDB51_hmdb6", "mgrit_hmdb51/generated"),
        ways_accuracy,
        f"{GENERATED} The net on generated clips has random weights. One seed; `--split 9:1` draws the paper's shares "
        "of real clips, of whose training part one in ten chooses the epoch. 3 levels coarsened by 4, 2 cycles "
        "forward and 1 backward are the options of the published UCI-HAR command, not the paper's text; the width of "
        "the network is ours, too.",
        "mgrit_hmdb51.run",
    ),
    Claim(
        MGRIT,
        "The published example, UCI-HAR",
        "a log of the published code has 87 % with its own inexact inference, 84 % serially",
        ("mgrit_har/har", "mgrit_har/generated"),
        ways_accuracy,
        f"{GENERATED} Generated series say nothing about UCI-HAR. Epochs are ours.",
        "mgrit_har.run",
    ),
    Claim(
        MGRIT,
        "… the same on a GPU",
        "not reported",
        ("mgrit_har/har_cuda", "mgrit_har/generated_cuda"),
        ways_accuracy,
        f"{GENERATED} 128 steps, which cuDNN is hard to beat at: **the implicit GRU takes twice its time by "
        "exact multigrid, 23 times as published and 45 times in order**, step by step in torch.",
        "mgrit_har.run --device cuda",
    ),
    Claim(
        MGRIT,
        "A fixed number of cycles is enough",
        "2 cycles forward, 1 backward, in the command published with its code",
        ("mgrit/accuracy",),
        accuracy_cost,
        "Small real series sets, five seeds, serial inference with the trained weights: the published setting is "
        "**not harmless on all of them**, OSULeaf loses a third of its accuracy.",
        "mgrit.accuracy",
    ),
    Claim(
        MGRIT,
        "… and its gradients",
        "not reported",
        ("mgrit/gradient_error",),
        gradient_errors,
        "Ours: random inputs, T = 128, float64, medians of three seeds.",
        "mgrit.gradient_error",
    ),
    Claim(
        MGRIT,
        "The classic GRU's step is unstable on coarse grids, the implicit one is not",
        "shown by its theory and accuracy",
        ("mgrit/instability",),
        coarse_steps,
        "Residuals of the forward solve of a GRU, two levels, F-relaxation; frozen gates are timeloom's default coarse "
        "step.",
        "mgrit.instability",
    ),
    Claim(
        BPPSA,
        "The backward pass is faster as a scan",
        "up to 108× (arXiv), 8.8× (proceedings) over cuDNN on RTX 2070 and 2080 Ti: RNN of 20 units, B = 2 … 256 at "
        "T = 1,000, T = 10 … 30,000 at B = 16",
        ("bppsa_bitstream/grid_rnn_cuda", "bppsa_bitstream/grid_rnn_cpu"),
        best_of("backward"),
        "Weights as initialised. Against torch's layer, cuDNN on a GPU. **108× is not reached**; the paper's own "
        "form, a tree of dense products, is as fast as cuDNN at best here. At T up to 300, and at B up to 8 and T = "
        "1,000, the scan's backward pass takes as long as cuDNN's, or up to 1.4 times as long. On a CPU the default "
        "scan multiplies no matrices: it is the compiled sweep in order.",
        "bppsa_bitstream.grid --device cuda",
    ),
    Claim(
        BPPSA,
        "A training step is faster",
        "up to 2.75×",
        ("bppsa_bitstream/grid_rnn_cuda", "bppsa_bitstream/grid_rnn_cpu"),
        best_of("both"),
        "Our forward pass is parallel in time too; the paper's is cuDNN's, in order.",
        "bppsa_bitstream.grid --device cuda",
    ),
    Claim(
        BPPSA,
        "… both, with a GRU",
        "within the numbers above",
        ("bppsa_bitstream/grid_gru_cuda",),
        best_of("backward", "both"),
        "Weights as initialised; the same streams and 20 units. The paper's GRU reads instruments.",
        "bppsa_bitstream.grid --cell gru --device cuda",
    ),
    Claim(
        BPPSA,
        "Bit streams by length, B = 16",
        "speedup grows to T = 30,000",
        ("bppsa_bitstream/bitstream",),
        bitstream_backward,
        "Backward pass alone, weights as initialised. Products of matrices do not pay on a CPU: those rows are slower "
        "than torch.",
        "bppsa_bitstream.run",
    ),
    Claim(
        BPPSA,
        "… on a GPU",
        "the same",
        ("bppsa_bitstream/bitstream_cuda",),
        bitstream_backward,
        "Against cuDNN, weights as initialised. Below some 2,000 steps, what the host does in a call is most of the "
        "time.",
        "bppsa_bitstream.run --device cuda",
    ),
    Claim(
        BPPSA,
        "… and their training",
        "same loss curve, 80 epochs of 32,000 streams at 1e-5, no clipping",
        ("bppsa_bitstream/bitstream_paper", "bppsa_bitstream/bitstream"),
        bitstream_training,
        "`--protocol paper` has the paper's streams, epochs and rate; else gradients are clipped. By the scan, the "
        "forward pass is in order, as the paper's.",
        "bppsa_bitstream.run",
    ),
    Claim(
        BPPSA,
        "… their training on a GPU",
        "the same",
        ("bppsa_bitstream/bitstream_cuda_paper", "bppsa_bitstream/bitstream_cuda"),
        bitstream_training,
        "1,000 bits are too few to gain over cuDNN: by default its layer runs them, and rounds products to tf32. Runs "
        "by the paper's protocol (`--protocol paper`) have as many of its 80 epochs as their steps say. "
        "Losses by the scan, which does not, go another way after some steps.",
        "bppsa_bitstream.run --device cuda",
    ),
    Claim(
        BPPSA,
        "A GRU on IRMAS, three lengths",
        "within the numbers above: 11 instruments, all 6,705 clips, B = 16, 32 and 64, 400 epochs at 3e-4",
        (
            "bppsa_irmas/irmas_paper_features",
            "bppsa_irmas/irmas",
            "bppsa_irmas/generated",
        ),
        instruments,
        f"{GENERATED} Eight instruments then; a rate of 0.02, clipped gradients, and a quarter of the recordings to "
        "test on (the paper trains on all). `--features paper` has its 38, 24 and 12 inputs. On one CPU thread the "
        "gain is that of compiled kernels, not of parallelism in time.",
        "bppsa_irmas.run",
    ),
    Claim(
        BPPSA,
        "… on a GPU",
        "the same",
        (
            "bppsa_irmas/irmas_paper_features_cuda",
            "bppsa_irmas/irmas_cuda",
            "bppsa_irmas/generated_paper_features_batch_64_cuda",
            "bppsa_irmas/generated_cuda",
        ),
        instruments,
        f"{GENERATED} **The scan gains nothing over cuDNN at hundreds of steps.** By default cuDNN runs the shortest, "
        "and our own sweep the longest, which gains in batches of 64 and loses in those of 16. At T = 1,034 in batches "
        "of 64 trained weights amplify the rounding of the scan: sweeps after it did not meet the tolerance, and every "
        "pass was made again by single steps, with Jacobians in memory. Since then more sweeps follow, or a run in "
        "order (not measured yet).",
        "bppsa_irmas.run --device cuda",
    ),
    Claim(
        BPPSA,
        "The scan is exact",
        "same convergence",
        ("bppsa_irmas/irmas", "bppsa_irmas/generated"),
        exactness,
        "Gradients are compared too, not curves alone; on a CPU. On a GPU cuDNN rounds products to tf32, and trains "
        "another network: some of its answers differ.",
        "bppsa_irmas.run",
    ),
    Claim(
        BPPSA,
        "Retraining a pruned VGG-11 is a practical use",
        "fewer FLOPs along the critical path than back-propagation over dense layers, levels=2, 97 % pruned",
        ("bppsa_vgg/cifar10_cuda", "bppsa_vgg/cifar10", "bppsa_vgg/generated_cuda", "bppsa_vgg/generated"),
        pruned_vgg,
        f"{GENERATED} **Nearly all of the gain is that of sparse Jacobians**, which sparse back-propagation in order "
        "has, too; the scan saves a quarter of it with one level (nothing with BatchNorm) and loses it with more. "
        "FLOPs are what a machine with a processor for each product could gain; by the clock the scan is far slower "
        "than autograd, on a GPU too.",
        "bppsa_vgg.run",
    ),
    Claim(
        BPPSA,
        "… with BatchNorm",
        "not reported",
        ("bppsa_vgg/generated_norm_cuda", "bppsa_vgg/generated_norm"),
        pruned_vgg,
        "The same network with BatchNorm behind every convolution. **One level takes more FLOPs than none.**",
        "bppsa_vgg.run --norm --device cuda",
    ),
    Claim(
        BPPSA,
        "Jacobians are mostly zeros that are known beforehand",
        "a table of zeros, and of generation times against autograd",
        ("bppsa_vgg/cifar10_cuda", "bppsa_vgg/cifar10", "bppsa_vgg/generated_norm_cuda", "bppsa_vgg/generated"),
        zeros,
        "With BatchNorm. One image at a time, weights pruned; autograd's columns are timed for some and counted for "
        "all.",
        "bppsa_vgg.run",
    ),
    Claim(
        BPPSA,
        "Θ(log n) steps scale with workers",
        "a complexity, and FLOPs along the critical path",
        ("bppsa_vgg/ranks",),
        workers,
        "**One level loses by the clock on any number of processes; two levels and all of them gain a fifth at best, "
        "on 4 and 8.** Products of a level over processes of one machine; other "
        "work held two of its cores at times. Each process writes all Jacobians down and makes all of the layers' own "
        "gradients, and matrices are exchanged: FLOPs alone say what is left without that.",
        "bppsa_vgg.ranks",
    ),
    Claim(
        DEER,
        "Evaluation on a GPU is faster by up to 3 orders of magnitude",
        _published("forward_ms") + "; " + _published("both_ms") + "; B = 16, over JAX's scan, V100",
        ("deer/grid_cuda",),
        beside_the_paper,
        "Weights as initialised. Another GPU, and another loop: ours starts each step from Python, and beyond 500 "
        "steps it is scaled; JAX's took 9 (n = 1) to 26 µs a step forward, 32 to 105 with the gradient. "
        "At n = 4, T = 1,000,000, B = 16 rounding kept Newton's residual above 1e-6, and a step-by-step run took its "
        "place.",
        "deer.grid --device cuda",
    ),
    Claim(
        DEER,
        "… and against torch's own layer",
        "not reported",
        ("deer/grid_cuda", "deer/grid_cpu"),
        grid_best("DEER", "DEER, captured", "quasi-DEER", "ELK", "shooting", "default"),
        "Weights as initialised. cuDNN is a far better loop than JAX's scan: beyond 32 units, where Jacobians lie in "
        "memory, DEER is slower.",
        "deer.grid --device cuda",
    ),
    Claim(
        DEER,
        "… where states are small and one sequence is long",
        "largest gains there",
        ("deer/grid_cuda",),
        small_and_long,
        "Against cuDNN, weights as initialised. Jacobians never leave the chip (n ≤ 32).",
        "deer.grid --device cuda",
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
        "25× over JAX's scan: some 4.5 hours against 4 days 20 hours until it stopped",
        ("deer_eigenworms/eigenworms", "deer_eigenworms/generated"),
        worms,
        f"{GENERATED} By the default solver (chunks side by side), against `torch.nn.GRU`.",
        "deer_eigenworms.run",
    ),
    Claim(
        DEER,
        "… on a GPU",
        "the same",
        ("deer_eigenworms/eigenworms_paper_cuda", "deer_eigenworms/eigenworms_cuda", "deer_eigenworms/generated_cuda"),
        worms,
        f"{GENERATED} **Less than 10×**, against cuDNN, which is a far better loop than JAX's scan; a whole training "
        "step with norms, perceptrons and optimizer, run eagerly.",
        "deer_eigenworms.run --device cuda",
    ),
    Claim(
        DEER,
        "A GRU on EigenWorms",
        "88.0 ± 4.4 % of 39 test series (3 seeds, 70/15/15, Adam at 3e-5, a stop after 1,000 epochs without a better "
        "accuracy)",
        (
            "deer_eigenworms/eigenworms_paper_cuda",
            "deer_eigenworms/eigenworms_paper",
            "deer_eigenworms/eigenworms",
            "deer_eigenworms/generated",
        ),
        worms_accuracy,
        "Generated worms say nothing about the real set: one seed, 12 and 20 epochs at 2e-3, 20 test series. `--data "
        "EigenWorms --protocol paper --twin` has seeds, split, rate and patience of the paper, and a twin by torch; "
        "the split of a seed is drawn by another generator.",
        "deer_eigenworms.run",
    ),
    Claim(
        DEER,
        "A Hamiltonian network on two bodies",
        "more than 10 times as fast (a day against two weeks): 800/100/100 orbits of 10,000 steps, batch 16, 6 × 64 "
        "softplus, 20 more time steps in every epoch",
        ("deer_two_body/two_body_paper_cuda", "deer_two_body/two_body"),
        two_bodies,
        "The paper's loop is adaptive (`odeint` of JAX); ours takes the same Runge–Kutta steps, so that gradients can "
        "be compared to rounding. `--grow 20` adds time steps as the paper does.",
        "deer_two_body.run --size paper --device cuda",
    ),
    Claim(
        DEER,
        "… and what it learns",
        "same validation loss",
        ("deer_two_body/two_body",),
        two_bodies_learned,
        "Few orbits, and in small.",
        "deer_two_body.run",
    ),
    Claim(
        DEER,
        "… at the paper's size",
        "same validation loss",
        ("deer_two_body/two_body_paper_cuda",),
        two_bodies_learned,
        "**Not learned to the end**: minutes of training, on parts of the orbits. The paper trained for a day. "
        "`--grow 20` adds time steps as the paper does; pieces that begin anywhere, with a rate that falls and other "
        "first weights (`--pieces`), are ours.",
        "deer_two_body.run --size paper --pieces --batch 32 --rate 0.005 --device cuda",
    ),
    Claim(
        DEER,
        "A multi-head strided GRU on sequential CIFAR-10",
        "90.25 %",
        ("deer_cifar/cifar10_large_cuda", "deer_cifar/generated_large_cuda"),
        pixel_images,
        f"{GENERATED} **No faster than cuDNN**, by default: 192 GRUs of 8 units and 8 to 1,024 steps, each of which "
        "the host starts; cuDNN runs the short ones. The paper's run has AdamW with warm-up, dropout, flips and some "
        "250,000 steps; a few steps on generated images say nothing about 90 %.",
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
        ("deer/warm_cuda",),
        warm_starts,
        "A small task that is learned on the way. **With a guess DEER takes several times as long on a GPU**: without "
        "one, its step is a recorded graph.",
        "deer.warm --device cuda",
    ),
    Claim(
        DEER,
        "… on a CPU",
        "used, not measured",
        ("deer/warm",),
        warm_starts,
        "On one CPU thread fewer sweeps save little time.",
        "deer.warm",
    ),
)
