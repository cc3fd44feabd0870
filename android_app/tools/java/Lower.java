import java.io.*;
import java.nio.file.*;
import java.util.*;
import java.util.jar.*;
import java.util.zip.*;
import org.objectweb.asm.*;
import org.objectweb.asm.tree.*;

/**
 * Rewrites newer class files so that dx, which ends at Java 9, can take them: {@code Lower IN.jar OUT.jar ...} in
 * pairs.
 *
 * <ul>
 *   <li>string concatenation by invokedynamic (Java 9) becomes a StringBuilder (Concat);
 *   <li>a lambda by invokedynamic becomes a small class (Lambdas);
 *   <li>private members that nest mates use (Java 11) become package-private, and a class calls its own private
 *       methods by invokespecial;
 *   <li>nest, record and permitted-subclass attributes go, the version becomes 52 (Java 8).
 * </ul>
 *
 * What it cannot rewrite (a record, a dynamic constant, another bootstrap method) is an error that names the class:
 * Android has none of these, so such a class would only fail on the phone.
 */
public class Lower {
  static final int JAVA_8 = 52;

  public static void main(String[] args) throws Exception {
    if (args.length == 0 || args.length % 2 != 0) {
      throw new IllegalArgumentException("expected pairs IN.jar OUT.jar, received " + Arrays.toString(args));
    }
    for (int i = 0; i < args.length; i += 2) lower(Path.of(args[i]), Path.of(args[i + 1]));
  }

  static void lower(Path in, Path out) throws IOException {
    Map<String, ClassNode> classes = new TreeMap<>();
    try (ZipFile jar = new ZipFile(in.toFile())) {
      for (ZipEntry entry : Collections.list(jar.entries())) {
        String name = entry.getName();
        boolean skip = name.startsWith("META-INF/") || name.endsWith("module-info.class") || !name.endsWith(".class");
        if (skip) continue;
        ClassNode node = new ClassNode();
        try (InputStream bytes = jar.getInputStream(entry)) {
          new ClassReader(bytes.readAllBytes()).accept(node, 0);
        }
        classes.put(node.name, node);
      }
    }
    Set<String> widened = usedByNestMates(classes);
    Path beside = out.resolveSibling(out.getFileName() + ".new");
    Files.createDirectories(out.toAbsolutePath().getParent());
    try (JarOutputStream jar = new JarOutputStream(Files.newOutputStream(beside))) {
      for (ClassNode node : classes.values()) {
        Lambdas lambdas = new Lambdas();
        rewrite(node, classes, widened, lambdas, in);
        write(jar, node);
        for (ClassNode lambda : lambdas.made) write(jar, lambda);
      }
    }
    Files.move(beside, out, StandardCopyOption.REPLACE_EXISTING);
  }

  static void write(JarOutputStream jar, ClassNode node) throws IOException {
    ClassWriter writer = new ClassWriter(ClassWriter.COMPUTE_MAXS);
    node.accept(writer);
    ZipEntry entry = new ZipEntry(node.name + ".class");
    entry.setTime(0);
    jar.putNextEntry(entry);
    jar.write(writer.toByteArray());
    jar.closeEntry();
  }

  static String key(String owner, String name, String descriptor) {
    return owner + "." + name + descriptor;
  }

  /** Private members that another class of the same jar touches, or that hold the body of a lambda. */
  static Set<String> usedByNestMates(Map<String, ClassNode> classes) {
    Set<String> privates = new HashSet<>();
    for (ClassNode node : classes.values()) {
      for (MethodNode m : node.methods) if ((m.access & Opcodes.ACC_PRIVATE) != 0) privates.add(key(node.name, m.name, m.desc));
      for (FieldNode f : node.fields) if ((f.access & Opcodes.ACC_PRIVATE) != 0) privates.add(key(node.name, f.name, f.desc));
    }
    Set<String> used = new HashSet<>();
    for (ClassNode node : classes.values()) {
      for (MethodNode method : node.methods) {
        for (AbstractInsnNode insn : method.instructions) {
          String member = null;
          String owner = null;
          if (insn instanceof MethodInsnNode call) {
            owner = call.owner;
            member = key(call.owner, call.name, call.desc);
          } else if (insn instanceof FieldInsnNode field) {
            owner = field.owner;
            member = key(field.owner, field.name, field.desc);
          } else if (insn instanceof InvokeDynamicInsnNode dynamic && isLambda(dynamic)) {
            Handle body = (Handle) dynamic.bsmArgs[1];
            member = key(body.getOwner(), body.getName(), body.getDesc());
            if (privates.contains(member)) used.add(member);
            continue;
          }
          if (member != null && !node.name.equals(owner) && privates.contains(member)) used.add(member);
        }
      }
    }
    return used;
  }

  static void rewrite(ClassNode node, Map<String, ClassNode> classes, Set<String> widened, Lambdas lambdas, Path jar) {
    if ((node.access & Opcodes.ACC_RECORD) != 0 || node.recordComponents != null) throw refused(jar, node, "a record");
    node.version = Math.min(node.version & 0xffff, JAVA_8);
    node.nestHostClass = null;
    node.nestMembers = null;
    node.permittedSubclasses = null;
    Set<String> stillPrivate = new HashSet<>();
    for (FieldNode field : node.fields) {
      if (widened.contains(key(node.name, field.name, field.desc))) field.access &= ~Opcodes.ACC_PRIVATE;
    }
    for (MethodNode method : node.methods) {
      if ((method.access & Opcodes.ACC_PRIVATE) == 0) continue;
      if (!widened.contains(key(node.name, method.name, method.desc))) {
        stillPrivate.add(method.name + method.desc);
        continue;
      }
      method.access &= ~Opcodes.ACC_PRIVATE;
      // Package-private methods are virtual: a subclass must not override by accident what was private.
      if ((method.access & Opcodes.ACC_STATIC) == 0 && !method.name.equals("<init>")) {
        for (ClassNode other : classes.values()) {
          boolean clashes = other.methods.stream().anyMatch(m -> m.name.equals(method.name) && m.desc.equals(method.desc));
          if (node.name.equals(other.superName) && clashes) throw refused(jar, other, "an override of a private method");
        }
        method.access |= Opcodes.ACC_FINAL;
      }
    }
    for (MethodNode method : node.methods) {
      for (AbstractInsnNode insn : method.instructions.toArray()) {
        if (insn instanceof InvokeDynamicInsnNode dynamic) {
          if (isLambda(dynamic)) lambdas.replace(node, method, dynamic);
          else if (Concat.is(dynamic)) Concat.replace(method, dynamic);
          else throw refused(jar, node, "invokedynamic by " + dynamic.bsm.getOwner() + " in " + method.name);
        } else if (insn instanceof LdcInsnNode constant && constant.cst instanceof ConstantDynamic) {
          throw refused(jar, node, "a dynamic constant in " + method.name);
        } else if (insn instanceof MethodInsnNode call && call.owner.equals(node.name)
            && call.getOpcode() != Opcodes.INVOKESTATIC && stillPrivate.contains(call.name + call.desc)) {
          call.setOpcode(Opcodes.INVOKESPECIAL);
        }
      }
    }
  }

  static boolean isLambda(InvokeDynamicInsnNode dynamic) {
    return dynamic.bsm.getOwner().equals("java/lang/invoke/LambdaMetafactory");
  }

  static IllegalStateException refused(Path jar, ClassNode node, String what) {
    return new IllegalStateException(jar.getFileName() + ": " + node.name + " holds " + what + ", which Android 8 cannot run");
  }
}
