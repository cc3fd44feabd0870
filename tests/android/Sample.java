import java.util.*;
import java.util.function.*;

/** What tools/java rewrites: private members of nested classes, lambdas, method references, concatenation. */
public class Sample {
    private int secret = 41;
    private static String hidden(long a, double b) { return a + "|" + b; }
    private int next() { return ++secret; }

    interface Shape { double area(); default String tell() { return "area " + area(); } }

    class Inner {
        public String toString() { return "inner " + secret; }
        private char mark = 'x';
        int peek() { return next() + secret; }
        String all(byte a, short b, char c, boolean d, float e, Object f) { return "\u00e4" + a + b + c + d + e + f + null + mark; }
    }

    static class Base { private String who() { return "base"; } String ask() { return who(); } }

    <T extends Comparable<T>> T largest(List<T> values, Comparator<? super T> order) { return Collections.max(values, order); }

    public static void main(String[] args) throws Exception {
        Sample sample = new Sample();
        Inner inner = sample.new Inner();
        long base = 5;
        System.out.println(inner.peek() + " " + inner.mark + " " + inner.all((byte) 1, (short) 2, 'c', true, 1.5f, List.of(1)));
        System.out.println(hidden(3L, 0.5) + new Base().ask());
        IntUnaryOperator add = value -> value + (int) base;
        Function<Integer, Long> box = value -> value * base;
        Supplier<List<String>> make = ArrayList::new;
        BiFunction<String, String, Boolean> same = String::equals;
        Supplier<String> bound = inner::toString;
        Runnable drop = sample::next;
        drop.run();
        ToDoubleFunction<Integer> widen = value -> value;
        Shape shape = () -> 2.5;
        Runnable both = (Runnable & java.io.Serializable) () -> System.out.println("both " + sample.secret);
        both.run();
        List<String> words = make.get();
        words.add("b"); words.add("ccc"); words.add("a");
        System.out.println(add.applyAsInt(1) + " " + box.apply(7) + " " + same.apply("a", "a") + " " + bound.get() + " " + shape.tell());
        System.out.println(sample.largest(words, Comparator.comparing(String::length).thenComparing(Comparator.reverseOrder())));
        System.out.println(widen.applyAsDouble(3));
    }
}
