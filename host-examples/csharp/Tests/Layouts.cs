using System;
using System.Reflection;
using System.Runtime.InteropServices;
using VideoVae;

/// <summary>Prints the layout of every struct of Native.cs; tests/host_csharp.rs compares it with the library's own.</summary>
internal static class Layouts
{
    public static void Print()
    {
        foreach (Type type in typeof(Native).GetNestedTypes(BindingFlags.Public))
        {
            if (!type.IsValueType) continue;
            Console.WriteLine($"layout {type.Name} {Marshal.SizeOf(type)}");
            foreach (FieldInfo field in type.GetFields())
            {
                Console.WriteLine($"layout {type.Name}.{field.Name} {Marshal.OffsetOf(type, field.Name)}");
            }
        }
    }
}
