"""Writes the NuGet package: pack.py OUT VERSION VideoVae.dll THIRD-PARTY.md RID=LIBRARY...

A package is a zip with a manifest. There is no NuGet client without the .NET SDK, so this writes it itself.
"""

import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

NUSPEC = """<?xml version="1.0" encoding="utf-8"?>
<package xmlns="http://schemas.microsoft.com/packaging/2013/05/nuspec.xsd">
  <metadata>
    <id>VideoVae</id>
    <version>{version}</version>
    <authors>video-vae</authors>
    <license type="expression">Apache-2.0</license>
    <licenseUrl>https://licenses.nuget.org/Apache-2.0</licenseUrl>
    <readme>README.md</readme>
    <requireLicenseAcceptance>false</requireLicenseAcceptance>
    <description>The SeedVR2 video autoencoder: video to latents and back, exactly, within a memory limit. \
Wrapper and native library for Linux and Windows.</description>
    <tags>vae video latent seedvr2 cuda native</tags>
    <dependencies>
      <group targetFramework=".NETStandard2.1" />
    </dependencies>
  </metadata>
</package>
"""

TYPES = """<?xml version="1.0" encoding="utf-8"?>
<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">
  <Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml" />
{parts}
  <Override PartName="/LICENSE" ContentType="application/octet" />
</Types>
"""

RELATIONS = """<?xml version="1.0" encoding="utf-8"?>
<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/relationships">
  <Relationship Type="http://schemas.microsoft.com/packaging/2010/07/manifest" Target="/VideoVae.nuspec" Id="R1" />
</Relationships>
"""


def main() -> None:
    out, version, assembly, notices, *native = sys.argv[1:]
    files = {
        "lib/netstandard2.1/VideoVae.dll": Path(assembly).read_bytes(),
        "README.md": (ROOT / "host-examples/csharp/README.md").read_bytes(),
        "LICENSE": (ROOT / "LICENSE").read_bytes(),
        "THIRD-PARTY.md": Path(notices).read_bytes(),
        "VideoVae.nuspec": NUSPEC.format(version=version).encode(),
        "_rels/.rels": RELATIONS.encode(),
    }
    for pair in native:
        runtime, library = pair.split("=", 1)
        files[f"runtimes/{runtime}/native/{Path(library).name}"] = Path(library).read_bytes()
    extensions = sorted({Path(name).suffix[1:] for name in files} - {"", "rels"})
    parts = "\n".join(f'  <Default Extension="{e}" ContentType="application/octet" />' for e in extensions)
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as package:
        for name, content in {"[Content_Types].xml": TYPES.format(parts=parts).encode(), **files}.items():
            # A fixed date, so that the same files give the same package.
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            package.writestr(entry, content)


if __name__ == "__main__":
    main()
