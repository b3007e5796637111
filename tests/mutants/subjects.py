"""The Python test files that exercise a file of the product, those closest to it first."""

import re

#: Patterns of paths below `src` and `python/tensorizer`; the first that fits counts.
SUBJECTS = {
    "src/api/(slice|archive)|plan/slice|gather|mem/slice": "slices torch_files dtensors device",
    "src/api/iterate": "iterate iterate_plan operators_iterate",
    "src/api/shard": "shards shards_hostile shards_needed",
    "src/api/save_safetensors": "save_safetensors",
    "src/(api/save|engine/write)": "writing save_safetensors replacing encryption device",
    "src/api/(device|unlock|headers|head)|target/d|by_device|staging": "device encryption reading "
    "memory_limit",
    "src/api/(cached_head|hub)": "known_heads hf",
    "src/(engine|api)": "reading memory_limit sources cold_files http slices",
    "src/io/auth": "clouds s3_credentials s3_identity clouds_faults",
    "src/io/hf": "hf",
    "src/io/http": "http http_versions known_heads http_hostile",
    "src/io/redis": "redis redis_hostile",
    "src/io/object/s3": "s3 s3_endpoints s3_sums s3_versions s3_credentials",
    "src/io/object/(upload|cloud)": "upload clouds_upload upload_answers clouds",
    "src/io/local": "reading cold_files replacing temporaries writing two_savers memory_limit",
    "src/io/cache": "cache cache_damage",
    "src/io/transport": "http tls http_versions redis s3 upload",
    "src/io": "sources addresses folders reading",
    "checkpoints/": "torch_compat pairs two_savers replacing lightning state_dict_files",
    "distributed/(other|remote)": "dcp_foreign dcp_metadata dcp_items sources dcp",
    "distributed/": "dcp_items dcp_metadata dcp_hostile dcp_foreign dcp_jobs dcp",
    "group/(blocks|wishes)": "group_plans group dtensors",
    "group/gathered_save": "save_dtensors dtensors group",
    "group/": "group group_plans dtensors",
    "file/slices": "slices iterate",
    "file/(exchange|block_reader)": "group device iterate",
    "file/(selection|load_|parts|planned|request|loaded|collective)": "reading slices "
    "state_dict_files shards dtensors iterate group device torch_files safetensors",
    "file/(unpickled|pickles)": "torch_files torch_files_pickles torch_files_hostile",
    "file/encryption": "encryption",
    "file/to_redis": "redis",
    "file/progress": "progress",
    "file/(nesting|name_tree)": "state_dict_files torch_files metadata name_bombs large_headers",
    "file/(opening|legacy|reader|open_file|placement|options)": "reading reading_objects "
    "interop old_names modules module_state shards sources metadata mapping safetensors encryption",
    "file/": "reading writing iterate metadata",
    "modules/": "module_state modules meta_tensors wrapped_modules",
    "safetensors/": "safetensors_module safetensors_raw safetensors_models prefetch",
    "streams/(credentials|endpoints|servers|certificates)": "s3_credentials s3_endpoints s3 "
    "mistakes",
    "streams/": "sources s3 http upload old_names mistakes addresses",
    "tensors/(messages|arrays|handles)": "mapping interop native_calls old_names reading",
    "tensors/": "subclasses dtensors fake_mode meta_tensors device writing",
    "torch_hooks/lightning|lightning": "lightning",
    "torch_hooks/(save_and_load)": "torch_compat pairs lightning two_savers",
    "torch_hooks/": "operators compile dispatch process torch_compat",
    "transformers/": "transformers frameworks folders hf",
    "": "reading writing",
}


def test_files(file: str) -> list[str]:
    """Return the test files to try on a mutant of a file."""
    names = next(names for pattern, names in SUBJECTS.items() if re.search(pattern, file))
    return [f"tests/python/test_{name}.py" for name in names.split()]
