"""Run by the Python that has SkyPilot: reads tasks as a JSON list, writes for each why SkyPilot refuses it, or null."""

import json
import sys

from sky.utils import common_utils, schemas


def closed(schema: object) -> object:
    """A schema in which every object has no other keys than those it names; `job_recovery` would take any."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("additionalProperties", True) is True:
        inner["additionalProperties"] = False
    return inner


def refusal(task: dict[str, object]) -> str | None:
    """What SkyPilot's schemas say against a task; None when they accept it."""
    try:
        common_utils.validate_schema(task, schemas.get_task_schema(), "task: ")
        if "resources" in task:  # the task's schema says of it only that it is an object
            common_utils.validate_schema(task["resources"], closed(schemas.get_resources_schema()), "resources: ")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    answers = [refusal(task) for task in json.load(sys.stdin)]
    sys.stdout.write(f"\n{json.dumps(answers)}\n")
