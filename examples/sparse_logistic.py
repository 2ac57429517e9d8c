"""A program of scheduled parameters in one file: logistic regression with few coefficients, on handwritten digits.

min Σ log(1 + exp(-y_i·x_iβ)) + λ·‖β‖₁; the curvature of coefficient j is at most x_jᵀx_j / 4 (Bradley et al. 2011).
"""

import numpy as np
from sklearn.datasets import load_digits

import paceline


class SparseLogistic(paceline.ScheduledProgram):
    def __init__(self, matrix, labels, penalty):  # labels: -1 or 1
        self.matrix, self.labels, self.weight = matrix, labels, penalty
        self.norms = np.linalg.norm(matrix, axis=0)

    @property
    def blocks(self):
        return self.matrix.shape[1]

    @property
    def rows(self):
        return len(self.labels)

    def initial(self):
        return np.zeros(self.blocks)

    def start(self, rows):  # what one worker keeps
        return {"x": self.matrix[rows], "y": self.labels[rows], "scores": np.zeros(len(rows))}

    def push(self, state, chosen, values):  # its partial sums: the gradient of its rows
        slopes = -state["y"] / (1 + np.exp(state["y"] * state["scores"]))
        return state["x"][:, chosen].T @ slopes

    def pull(self, sums, chosen, values):  # new values of the sums over all workers
        curvature = self.norms[chosen] ** 2 / 4
        target = values - sums / curvature
        return np.sign(target) * np.maximum(np.abs(target) - self.weight / curvature, 0)

    def absorb(self, state, chosen, before, after):
        state["scores"] += state["x"][:, chosen] @ (after - before)

    def dependency(self, chosen, values):
        unit = self.matrix[:, chosen] / self.norms[chosen]
        return np.abs(unit.T @ unit)

    def loss(self, state):
        return np.logaddexp(0, -state["y"] * state["scores"]).sum()

    def penalty(self, values):
        return self.weight * np.abs(values).sum()


if __name__ == "__main__":
    images, digits = load_digits(return_X_y=True)
    seen = images.std(0) > 0
    images = (images[:, seen] - images[:, seen].mean(0)) / images[:, seen].std(0)
    program = SparseLogistic(images, np.where(digits == 8, 1, -1), penalty=20.0)
    run = paceline.schedule_parameters(program, "priority:at_once=4,bound=0.3", engine="local", workers=2)
    print(f"objective {run.objective:.4f}, {np.count_nonzero(run.values)} of {program.blocks} coefficients")
