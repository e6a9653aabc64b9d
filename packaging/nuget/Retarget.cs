// Makes an assembly refer to netstandard 2.1 in place of a runtime's own assemblies: retarget IN OUT
using Mono.Cecil;

internal static class Retarget
{
    private static void Main(string[] words)
    {
        var assembly = AssemblyDefinition.ReadAssembly(words[0]);
        foreach (AssemblyNameReference reference in assembly.MainModule.AssemblyReferences)
        {
            reference.Name = "netstandard";
            reference.Version = new System.Version(2, 1, 0, 0);
            reference.PublicKeyToken = new byte[] { 0xcc, 0x7b, 0x13, 0xff, 0xcd, 0x2d, 0xdd, 0x51 };
        }
        assembly.Write(words[1]);
    }
}
