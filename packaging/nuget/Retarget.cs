// Makes an assembly refer to netstandard 2.1 in place of a runtime's own assemblies: retarget IN OUT
using System;
using System.IO;
using Mono.Cecil;

internal static class Retarget
{
    private static void Main(string[] words)
    {
        var assembly = AssemblyDefinition.ReadAssembly(words[0]);
        foreach (AssemblyNameReference reference in assembly.MainModule.AssemblyReferences)
        {
            reference.Name = "netstandard";
            reference.Version = new Version(2, 1, 0, 0);
            reference.PublicKeyToken = new byte[] { 0xcc, 0x7b, 0x13, 0xff, 0xcd, 0x2d, 0xdd, 0x51 };
        }
        assembly.Write(words[1]);
        SetDate(words[1], Environment.GetEnvironmentVariable("SOURCE_DATE_EPOCH") ?? "0");
    }

    // The header has the time of the build, and the same sources are to give the same bytes.
    private static void SetDate(string path, string seconds)
    {
        byte[] file = File.ReadAllBytes(path);
        int header = BitConverter.ToInt32(file, 0x3c);
        BitConverter.GetBytes(uint.Parse(seconds)).CopyTo(file, header + 8);
        File.WriteAllBytes(path, file);
    }
}
