"""An Optuna objective, unchanged: Hydra Tune runs it on all devices and keeps the same records.

python examples/optuna_objective.py
hydra-tune search examples/optuna_objective.py:objective --trials 20 --metric accuracy --direction maximize
"""

import optuna
from sklearn.datasets import load_wine
from sklearn.linear_model import SGDClassifier
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler


def objective(trial: optuna.Trial) -> float:
    features, labels = load_wine(return_X_y=True)
    train_x, valid_x, train_y, valid_y = train_test_split(features, labels, test_size=0.3, random_state=0)
    scaler = StandardScaler().fit(train_x)
    model = SGDClassifier(
        alpha=trial.suggest_float("alpha", 1e-6, 1e1, log=True),
        loss=trial.suggest_categorical("loss", ["hinge", "log_loss", "modified_huber"]),
        random_state=0,
    )
    score = 0.0
    for step in range(20):
        model.partial_fit(scaler.transform(train_x), train_y, classes=[0, 1, 2])
        score = model.score(scaler.transform(valid_x), valid_y)
        trial.report(score, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return score


if __name__ == "__main__":
    import hydra_tune as ht

    result = ht.search(objective, trials=20, metric="accuracy", direction="maximize", pruner="median", seed=0)
    print(f"best accuracy {result.best_value:.3f} with {result.best_params}")
