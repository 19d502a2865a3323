"""Write slurm/*.sbatch from the template of all job scripts (pipeline/launch/job_script.py).

python scripts/make_sbatch.py
"""

from __future__ import annotations

from pathlib import Path

from pipeline.launch.job_script import job_script, requeue_lines

FOLDER = Path(__file__).parents[1] / "slurm"
SHARED = """#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
#SBATCH --signal=B:USR1@900
# Written by scripts/make_sbatch.py; yours to change. USR1 comes 15 minutes before the time limit, early enough for a
# resume point. The program then ends with 75, which requeues the job; 0 is finished, 1 is failed, and Slurm's state is
# the same. What TERM means (scancel, preemption, a drained node) Slurm knows itself.
"""
SETUP = ["", "# module load cuda; source .venv/bin/activate"]
PYTHON = '"${PIPELINE_PYTHON:-python}" -m pipeline "$@"'
TORCHRUN = (
    'srun --kill-on-bad-exit=1 "${PIPELINE_PYTHON:-python}" -m torch.distributed.run'
    ' --nnodes="$SLURM_NNODES" \\\n  --nproc-per-node="${SLURM_GPUS_ON_NODE:-1}"'
    ' --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --max-restarts=0 \\\n '
    ' --rdzv-endpoint="$FIRST:$((15000 + SLURM_JOB_ID % 15000))" --shutdown-timeout=86400 \\\n '
    ' --signals-to-handle=SIGTERM,SIGUSR1,SIGHUP -m pipeline "$@"'
)
AGAIN = requeue_lines('"$SLURM_JOB_ID"', ' && [ "${SLURM_RESTART_COUNT:-0}" -lt 20 ]')


def head(title: str, command: str, **options: object) -> list[str]:
    """Return the first lines of a job script: its purpose, and what it requests of Slurm."""
    lines = ["#SBATCH --job-name=pipeline"]
    for key, value in options.items():
        option = key.replace("_", "-")
        lines.append(f"#SBATCH --{option}={value}")
    return [f"# {title}:  sbatch slurm/{command} ...", *lines, *SHARED.splitlines()]


def files() -> dict[str, str]:
    """Return the name and text of each file."""
    one = head(
        "One run on one GPU, as often as its time limit needs",
        "one_gpu.sbatch stage=sft expert=math",
        gres="gpu:1",
        cpus_per_task=8,
        mem="64G",
    )
    fsdp = head(
        "One training on the GPUs of one node, sharded",
        "one_node_fsdp.sbatch stage=sft expert=math model=llama3.1_8b",
        gres="gpu:4",
        cpus_per_task=32,
        mem="256G",
    )
    several = head(
        "One training on the GPUs of several nodes",
        "several_nodes.sbatch stage=sft sft.processes=16",
        nodes=2,
        ntasks_per_node=1,
        gres="gpu:8",
        cpus_per_task=64,
        mem="512G",
    )
    meeting = [
        (
            "# A torchrun a node, which starts a process a GPU; one that fails ends all. They meet"
            " at the first node."
        ),
        (
            'FIRST=$(scontrol show node "$(scontrol show hostnames | head -n 1)" '
            "| sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')"
        ),
    ]
    return {
        "one_gpu.sbatch": job_script(PYTHON, one, SETUP, then=AGAIN),
        "one_node_fsdp.sbatch": job_script(
            f'{PYTHON} sft.parallel=fsdp2 "sft.processes=${{SLURM_GPUS_ON_NODE:-4}}"',
            fsdp,
            SETUP,
            then=AGAIN,
        ),
        "several_nodes.sbatch": job_script(
            TORCHRUN,
            several,
            [*SETUP, *meeting],
            then=(
                '[ -z "$ASKED" ] || [ "$STATUS" = 0 ] || STATUS=75  # torchrun itself ends with'
                f" 1\n{AGAIN}"
            ),
            on_usr1='scancel --signal=USR1 "$SLURM_JOB_ID"',  # to all tasks, not to this script
            on_term=":",  # Slurm sends it to the tasks as well
        ),
    }


if __name__ == "__main__":
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
