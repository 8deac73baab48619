"""NVFlare's FedAvg over clients that train by FedZMG, in its simulator."""

import json
import tempfile
from pathlib import Path

from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv
from nvflare_client import Net

recipe = FedAvgRecipe(
    name="fedzmg",
    model=Net(),
    min_clients=2,
    num_rounds=3,
    train_script=str(Path(__file__).with_name("nvflare_client.py")),
    key_metric="loss",
    key_metric_mode="min",
)
with tempfile.TemporaryDirectory() as workspace:
    place = recipe.execute(SimEnv(num_clients=2, workspace_root=workspace)).get_result()
    lines = next(Path(place).rglob("round_metrics.jsonl")).read_text().splitlines()
rounds = [{m["name"]: m["value"] for m in json.loads(x)["aggregated_metrics"]} for x in lines]
print(f"loss {rounds[0]['loss']:.3f} -> {rounds[-1]['loss']:.3f}")
print(f"sums over inputs differ from decay alone by {max(r['drift'] for r in rounds):.1e}")
