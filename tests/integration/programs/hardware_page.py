"""A program as the Hardware page shows them: module-level statements, functions of `__main__`, one Call each way.

Only the amounts are those of a small machine. Run as a script; prints what it got as JSON.
"""

import json
import os

import outerproduct as op

client = op.init()

image = op.Image.from_registry(os.environ["OUTERPRODUCT_BASE_IMAGE"])


def train_model(data):
    return sum(data)


def preprocess(client: op.OuterProductClient, shard):
    return shard * 10


training_data = [1, 2, 3]

run: op.Run[object] | op.Call[object] = client.run(
    fn=train_model,
    args=(training_data,),
    image=image,
    cpu=1,
    memory_bytes=256 * 1024**2,
)
small: op.Run[object] | op.Call[object] = client.run(fn=train_model, args=(training_data,), image=image)

available = set()
for node in client.list_nodes():
    resources: op.ComputeResources | None = node.total_resources
    if resources is not None:
        available.add((resources.accelerator, resources.accelerator_count))

try:
    client.run(
        fn=train_model,
        args=(training_data,),
        image=image,
        cpu=8,
        memory_bytes=32 * 1024**3,
        gpu=1,
        gpu_type="A100-80GB",
    )
except op.UnsupportedConfiguration as error:
    unsupported = str(error)

shards = list(client.map(preprocess, [1, 2, 3], image=image, cpu=1, memory_bytes=256 * 1024**2))

print(
    json.dumps(
        {
            "trained": run.wait(),
            "defaults": small.wait(),
            "available": sorted(available),
            "unsupported": unsupported,
            "shards": shards,
        }
    )
)
